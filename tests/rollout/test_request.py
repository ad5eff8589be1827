"""The request: its doors, its states, its saved form. Laws 1 and 4; the walks over all of them are
in `test_request_machine.py`.
"""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.protocol import VersionSpan
from agentrl.errors import LedgerError
from agentrl.messages import Message
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


def make_request() -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="Hi")])


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
    # One where it begins, one in `_follow`, one where a saved request is restored.
    assert sum("._state = " in line for line in lines) == 3


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
