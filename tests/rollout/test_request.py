"""The request: its doors, its states, its saved form. invariants (ledger consistency; one state
machine); the walks over all of them are in `test_request_machine.py`.
"""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.engines.protocol import VersionSpan
from agentrl.errors import LedgerError, TransitionError
from agentrl.messages import FunctionCall, Message, ToolCall
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import (
    ENDS,
    FINAL_STATES,
    TRANSITIONS,
    RequestState,
    StopReason,
)
from tests.fakes.request_mistakes import BROKEN, DAMAGES, WRONG_OBSERVATIONS, WRONG_SAMPLES
from tests.fakes.request_model import FAILURES, snapshot

IDS = st.lists(st.integers(0, 2**18), max_size=5)


def make_request() -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="Hi")])


def test_ledger_consistency_lists_handed_out_are_copies() -> None:
    request = make_request()
    request.begin([1])
    request.append_sampled([5], [-1.0])
    request.response_ids.append(9)
    request.loss_mask[0] = 0
    assert (request.response_ids, request.loss_mask) == ([5], [1])


def test_state_machine_no_way_leads_out_of_an_end() -> None:
    assert TRANSITIONS[RequestState.FAILED] == frozenset()
    assert TRANSITIONS[RequestState.COMPLETED] == {RequestState.FAILED}
    living = set(RequestState) - FINAL_STATES
    assert all(RequestState.FAILED in TRANSITIONS[state] for state in living)


def test_state_machine_state_is_assigned_in_one_place(pytestconfig: pytest.Config) -> None:
    sources = (pytestconfig.rootpath / "agentrl").rglob("*.py")
    lines = [line for file in sources for line in file.read_text().splitlines()]
    # One in `_follow`, one where a saved request is restored.
    assert sum("._state = " in line for line in lines) == 2


def test_failures_are_data_infrastructure_stays_out_of_the_baseline() -> None:
    for reason, end in ENDS.items():
        failed = end.state is RequestState.FAILED
        assert end.in_baseline == end.trained == (not failed), reason
        assert reason.value == str(reason)


def test_every_stop_reason_has_an_end_and_a_sentence() -> None:
    assert set(ENDS) == set(StopReason)


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


def test_requests_are_equal_where_all_that_is_known_of_them_is() -> None:
    request = make_request()
    request.begin([1])
    request.take_edge(RequestState.RUNNING)
    request.append_sampled([3, 4], [-0.5, -1.0], weight_versions=(VersionSpan(0, 0, 2),))
    saved = AsyncRolloutRequest.model_validate(request.model_dump(mode="json"))
    assert saved == request
    assert copy.copy(request) == request
    assert pickle.loads(pickle.dumps(request)) == request
    goes_on = copy.deepcopy(request)
    goes_on.append_observed([5], role="tool")
    assert goes_on != request
    ends = copy.deepcopy(request)
    ends.finish(StopReason.ANSWERED)
    assert ends != request
    differs = copy.deepcopy(request)
    differs.turns[0].reward = 1.0
    assert differs != request
    renamed = request.model_copy(deep=True, update={"uid": "another"})
    assert renamed != request
    assert request != "no request"


def test_requests_of_other_log_probabilities_differ() -> None:
    request = make_request()
    request.begin([1])
    twin = copy.deepcopy(request)
    request.append_sampled([3], [-0.5])
    twin.append_sampled([3], [-0.25])
    assert twin.turns == request.turns
    assert twin != request


def test_finite_log_probabilities_are_taken_though_their_sum_overflows() -> None:
    request = make_request()
    request.begin([1])
    request.append_sampled([3, 4], [-1e308, -1e308])
    assert request.rollout_log_probs == [-1e308, -1e308]
    with pytest.raises(LedgerError, match="nan is not a log-probability"):
        request.append_sampled([3, 4, 5], [-1e308, -1e308, float("nan")])


def test_request_of_another_version_is_refused() -> None:
    saved = make_request().model_dump(mode="json") | {"version": 99}
    with pytest.raises(ValueError, match="version 99"):
        AsyncRolloutRequest.model_validate(saved)


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_a_saved_request_with_infinite_numbers_reads_back_equal(number: float) -> None:
    call = ToolCall(function=FunctionCall(name="f", arguments={"x": number}))
    request = AsyncRolloutRequest(
        messages=[Message(role="assistant", tool_calls=[call])],
        metrics={"seconds": number},
        extra_info={"x": number},
    )
    assert AsyncRolloutRequest.model_validate_json(request.model_dump_json()) == request


def test_prompt_is_set_once() -> None:
    request = make_request()
    with pytest.raises(LedgerError, match="without tokens"):
        request.begin([])
    request.begin([1])
    with pytest.raises(LedgerError, match="already"):
        request.begin([1])


def running_request() -> AsyncRolloutRequest:
    """In its first turn, of which two tokens were sampled and three observed."""
    request = make_request()
    request.begin([1, 2])
    request.take_edge(RequestState.RUNNING)
    request.append_sampled([3, 4], [-0.5, -1.0], weight_versions=(VersionSpan(0, 0, 2),))
    request.append_observed([5, 6, 7], role="tool")
    return request


def assert_refused(
    request: AsyncRolloutRequest, error: type[Exception], call: Callable[[], object]
) -> None:
    before = snapshot(request)
    with pytest.raises(error):
        call()
    assert snapshot(request) == before


@pytest.mark.parametrize("kind", WRONG_SAMPLES)
def test_state_machine_a_wrong_completion_changes_nothing(kind: str) -> None:
    request, wrong = running_request(), WRONG_SAMPLES[kind]([8, 9])
    assert_refused(request, LedgerError, lambda: request.append_sampled(**wrong))


@pytest.mark.parametrize("kind", WRONG_OBSERVATIONS)
def test_state_machine_a_wrong_observation_changes_nothing(kind: str) -> None:
    request, wrong = running_request(), WRONG_OBSERVATIONS[kind]([8, 9])
    assert_refused(request, LedgerError, lambda: request.append_observed(**wrong))


@pytest.mark.parametrize("kind", DAMAGES)
def test_ledger_consistency_a_damaged_saved_form_is_refused(kind: str) -> None:
    saved = running_request().model_dump(mode="json")
    DAMAGES[kind](saved)
    with pytest.raises(ValidationError):
        AsyncRolloutRequest.model_validate(saved)


@pytest.mark.parametrize("first", StopReason)
def test_failures_are_data_a_request_ends_once_and_takes_nothing_more(first: StopReason) -> None:
    request = running_request()
    errors = {reason: BROKEN if str(reason) in FAILURES else None for reason in StopReason}
    other = None if errors[first] else BROKEN
    assert_refused(request, TransitionError, lambda: request.finish(first, other))
    request.finish(first, errors[first])
    for reason, error in errors.items():
        assert_refused(request, TransitionError, lambda r=reason, e=error: request.finish(r, e))
    assert_refused(request, LedgerError, lambda: request.append_sampled([8], [-0.5]))
    assert_refused(request, LedgerError, lambda: request.append_observed([8], role="user"))
    assert_refused(request, LedgerError, lambda: request.begin([8]))


def test_budgets_no_token_enters_that_does_not_fit() -> None:
    request = running_request().model_copy(
        update={"budgets": Budgets(max_response_tokens=7, max_model_len=8)}
    )
    assert (request.num_tokens_left, request.nearest_limit) == (1, StopReason.MODEL_LENGTH)
    assert_refused(request, LedgerError, lambda: request.append_sampled([8, 9], [-0.5] * 2))
    assert_refused(request, LedgerError, lambda: request.append_observed([8, 9], role="tool"))
    request.append_sampled([8], [-0.5])
    assert request.num_tokens_left == 0
