"""The request: its doors, its states, its saved form. Laws 1 and 4."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.engines.protocol import FinishReason, VersionSpan
from agentrl.errors import Fault, LedgerError, TransitionError
from agentrl.messages import Message
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import (
    ENDS,
    FINAL_STATES,
    TRANSITIONS,
    RequestState,
    StopReason,
    state_diagram,
)

IDS = st.lists(st.integers(0, 2**18), max_size=5)
BROKEN = Failure(fault=Fault.ENGINE, kind="EngineError", message="gone", turn=0)


def make_request() -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="Hi")])


class RequestMachine(RuleBasedStateMachine):
    """Random walks over everything that can happen to a request, beside a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.request = make_request()
        self.request.begin([1, 2])
        self.sampled: list[bool] = []
        self.ids: list[int] = []
        self.excluded: set[int] = set()
        self.state = RequestState.PENDING
        self.ended = 0

    @rule(ids=IDS)
    def sample(self, ids: list[int]) -> None:
        self.request.append_sampled(ids, [-0.5] * len(ids), finish_reason=FinishReason.STOP)
        self.ids += ids
        self.sampled += [True] * len(ids)

    @rule(ids=IDS, role=st.sampled_from(["tool", "user"]))
    def observe(self, ids: list[int], role: str) -> None:
        self.request.append_observed(ids, role=role)
        self.ids += ids
        self.sampled += [False] * len(ids)

    @rule(ids=IDS, log_probs=st.lists(st.sampled_from([-1.0, 0.5, float("nan")]), max_size=5))
    def sample_wrongly(self, ids: list[int], log_probs: list[float]) -> None:
        if len(ids) == len(log_probs) and all(p <= 0 for p in log_probs):
            return
        with pytest.raises(LedgerError):
            self.request.append_sampled(ids, log_probs)

    @rule(index=st.integers(-2, 12))
    def exclude(self, index: int) -> None:
        turns = self.request.turns
        if 0 <= index < len(turns) and turns[index].role == "assistant":
            self.request.exclude_turn(index, "declared")
            self.excluded.update(range(turns[index].start, turns[index].end))
        else:
            with pytest.raises(LedgerError):
                self.request.exclude_turn(index, "declared")

    @rule(state=st.sampled_from(list(RequestState)))
    def take_edge(self, state: RequestState) -> None:
        if state in TRANSITIONS[self.state] and state not in FINAL_STATES:
            self.request.take_edge(state)
            self.state = state
        else:
            with pytest.raises(TransitionError):
                self.request.take_edge(state)

    @rule(reason=st.sampled_from(list(StopReason)))
    def finish(self, reason: StopReason) -> None:
        legal = ENDS[reason].state in TRANSITIONS[self.state] and not self.ended
        if legal:
            self.request.finish(reason, BROKEN)
            self.state = ENDS[reason].state
            self.ended += 1
        else:
            with pytest.raises(TransitionError):
                self.request.finish(reason)

    @precondition(lambda self: self.ended)
    @rule()
    def fail_scoring(self) -> None:
        if self.state is RequestState.COMPLETED:
            self.request.fail_scoring(BROKEN)
            self.state = RequestState.FAILED
        else:
            with pytest.raises(TransitionError):
                self.request.fail_scoring(BROKEN)

    @invariant()
    def ledger_agrees(self) -> None:
        request = self.request
        assert request.response_ids == self.ids
        mask = [int(s and i not in self.excluded) for i, s in enumerate(self.sampled)]
        assert request.loss_mask == mask
        assert [p < 0 for p in request.rollout_log_probs] == self.sampled
        assert request.input_ids == [1, 2, *self.ids]
        assert len(request.attention_mask) == len(request.position_ids) == len(self.ids) + 2

    @invariant()
    def turns_cover_the_response(self) -> None:
        place = 0
        for index, turn in enumerate(self.request.turns):
            assert (turn.index, turn.start) == (index, place)
            place = turn.end
        assert place == len(self.ids)

    @invariant()
    def state_agrees(self) -> None:
        assert self.request.state is self.state
        assert self.request.is_finished == bool(self.ended)
        if self.state is RequestState.FAILED:
            assert not self.request.is_trained
            assert not self.request.in_baseline
            assert self.request.error is not None

    @invariant()
    def saved_form_is_whole(self) -> None:
        saved = self.request.model_dump(mode="json")
        assert AsyncRolloutRequest.model_validate(saved).model_dump(mode="json") == saved


test_law_1_and_4_hold_on_every_walk = RequestMachine.TestCase


def test_law_1_lists_handed_out_are_copies() -> None:
    request = make_request()
    request.begin([1])
    request.append_sampled([5], [-1.0])
    request.response_ids.append(9)
    request.loss_mask[0] = 0
    assert (request.response_ids, request.loss_mask) == ([5], [1])


def test_law_4_no_way_leads_out_of_an_end() -> None:
    assert TRANSITIONS[RequestState.FAILED] == frozenset()
    assert TRANSITIONS[RequestState.COMPLETED] == {RequestState.FAILED}
    living = set(RequestState) - FINAL_STATES
    assert all(RequestState.FAILED in TRANSITIONS[state] for state in living)


def test_law_4_state_is_assigned_in_one_place(pytestconfig: pytest.Config) -> None:
    sources = (pytestconfig.rootpath / "agentrl").rglob("*.py")
    lines = [line for file in sources for line in file.read_text().splitlines()]
    # One in `_follow`, one where a saved request is restored, one declaration.
    assert sum("self._state = " in line for line in lines) == 2


def test_law_5_infrastructure_stays_out_of_the_baseline() -> None:
    for reason, end in ENDS.items():
        failed = end.state is RequestState.FAILED
        assert end.in_baseline == end.trained == (not failed), reason
        assert reason.value == str(reason)


def test_every_stop_reason_has_an_end_and_a_sentence() -> None:
    assert set(ENDS) == set(StopReason)


def test_diagram_has_every_edge() -> None:
    diagram = state_diagram()
    for source, targets in TRANSITIONS.items():
        for target in targets:
            assert f"{source} --> {target}" in diagram


def test_dropped_request_counts_for_nothing() -> None:
    request = make_request()
    request.begin([1])
    request.take_edge(RequestState.RUNNING)
    request.finish(StopReason.ANSWERED)
    assert request.is_trained
    assert request.in_baseline
    request.dropped = "a sample of its group failed"
    assert not request.is_trained
    assert not request.in_baseline


@given(IDS)
def test_request_survives_pickle_and_deepcopy(ids: list[int]) -> None:
    request = make_request()
    request.begin([1])
    request.append_sampled(ids, [-0.25] * len(ids), weight_versions=(VersionSpan(3, 0, len(ids)),))
    for twin in (pickle.loads(pickle.dumps(request)), copy.deepcopy(request)):
        assert twin.model_dump() == request.model_dump()
        twin.append_observed([4], role="tool")
        assert request.response_ids == ids


def test_request_of_another_version_is_refused() -> None:
    saved = make_request().model_dump(mode="json") | {"version": 99}
    with pytest.raises(ValueError, match="version 99"):
        AsyncRolloutRequest.model_validate(saved)


def test_prompt_is_set_once() -> None:
    request = make_request()
    with pytest.raises(LedgerError, match="without tokens"):
        request.begin([])
    request.begin([1])
    with pytest.raises(LedgerError, match="already"):
        request.begin([1])
