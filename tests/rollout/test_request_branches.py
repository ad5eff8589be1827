"""Branches of a request: set aside, attached, counted, saved and loaded."""

import copy
import pickle
from pathlib import Path

import pytest

from agentrl.errors import LedgerError
from agentrl.messages import Message
from agentrl.rollout.records import CallRecord
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import turn_seed
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.rollouts.files import read_rollouts, save_rollouts

HI = Message(role="user", content="Hi")


def make_request(name: str = "root") -> AsyncRolloutRequest:
    request = AsyncRolloutRequest(request_id=name, messages=[HI], uid=f"group of {name}")
    request.begin([1, 2])
    request.take_edge(RequestState.RUNNING)
    return request


def sample(request: AsyncRolloutRequest, *ids: int) -> None:
    request.append_sampled(ids, [-0.5] * len(ids))
    request.messages.append(Message(role="assistant", content=str(ids)))


def make_trajectory() -> AsyncRolloutRequest:
    """Two sequences that were set aside, a delegate of the second, and the last one."""
    request = make_request()
    sample(request, 3, 4)
    request.set_aside("compaction", [HI])
    request.begin([1, 2, 5])
    sample(request, 6)
    helper = make_request("helper")
    sample(helper, 7, 8, 9)
    helper.finish(StopReason.ANSWERED)
    request.add_branch(helper, "delegate")
    request.set_aside("rewrite", [HI, HI])
    request.begin([1])
    sample(request, 2)
    request.finish(StopReason.ANSWERED)
    return request


def test_sequence_that_is_set_aside_keeps_its_tokens_and_messages() -> None:
    request = make_request()
    sample(request, 3, 4)
    ids, messages, turns = request.input_ids, [*request.messages], request.turns
    branch = request.set_aside("compaction", [HI])
    assert (branch.input_ids, branch.messages, branch.turns) == (ids, messages, turns)
    assert (branch.state, branch.stop_reason) == (RequestState.COMPLETED, StopReason.CONTINUED)
    assert branch.is_trained
    assert (request.input_ids, request.messages, request.turns) == ([], [HI], ())
    assert (request.state, request.stop_reason) == (RequestState.RUNNING, None)
    request.begin([1])
    sample(request, 9)
    assert branch.response_ids == [3, 4]
    assert request.sequences == (branch, request)


def test_parents_lead_from_each_sequence_to_the_first() -> None:
    request = make_trajectory()
    first, helper, second = request.branches
    assert [one.branch_cause for one in request.sequences] == [
        "compaction", "delegate", "rewrite", None,
    ]  # fmt: skip
    assert first.parent_id is None
    assert helper.parent_id == second.request_id
    assert second.parent_id == first.request_id
    assert request.parent_id == second.request_id
    assert len({one.request_id for one in request.sequences}) == 4
    assert {one.uid for one in request.sequences} == {request.uid}


def test_branches_of_a_delegate_become_branches_of_its_caller() -> None:
    helper = make_request("helper")
    sample(helper, 3)
    helper.set_aside("compaction", [HI])
    helper.begin([1])
    sample(helper, 4)
    helper.finish(StopReason.ANSWERED)
    request = make_request()
    request.add_branch(helper, "delegate")
    inner, outer = request.branches
    assert (inner.branch_cause, outer.branch_cause) == ("compaction", "delegate")
    assert (inner.parent_id, outer.parent_id) == ("root", inner.request_id)
    assert not helper.branches


def test_counts_are_those_of_the_trajectory_without_delegates_and_summaries() -> None:
    request = make_request()
    sample(request, 3)
    request.turns[0].calls = [CallRecord(name="a"), CallRecord(name="b")]
    request.append_observed([4], role="user").is_compaction = True
    sample(request, 5)
    request.turns[2].is_compaction = True
    request.set_aside("compaction", [HI])
    request.begin([1])
    helper = make_request("helper")
    sample(helper, 7)
    helper.turns[0].calls = [CallRecord(name="a")]
    helper.finish(StopReason.ANSWERED)
    request.add_branch(helper, "delegate")
    assert (request.num_assistant_turns, request.num_user_turns) == (1, 0)
    assert (request.num_tool_calls, request.num_turns) == (2, 2)
    assert helper.num_tool_calls == 1


def test_seeds_differ_after_a_sequence_was_set_aside() -> None:
    request = make_request()
    seeds = [turn_seed(request)]
    for _ in range(3):
        sample(request, 3)
        request.set_aside("compaction", [HI])
        request.begin([1])
        seeds.append(turn_seed(request))
    assert len(set(seeds)) == 4


def test_branches_are_compared_copied_pickled_and_saved(tmp_path: Path) -> None:
    request = make_trajectory()
    save_rollouts(tmp_path / "rollouts.jsonl", [request], step=1)
    (loaded,) = read_rollouts(tmp_path / "rollouts.jsonl")
    twins = [copy.copy(request), copy.deepcopy(request), pickle.loads(pickle.dumps(request))]
    for twin in [*twins, loaded]:
        assert twin == request
        twin.branches[0].exclude_turn(0, "a test")
        assert twin != request
    assert request.branches[0].loss_mask == [1, 1]


def test_requests_of_older_files_have_no_branches() -> None:
    saved = make_request().model_dump(mode="json")
    for name in ("branches", "branch_cause", "parent_id"):
        del saved[name]
    loaded = AsyncRolloutRequest.model_validate(saved)
    assert (loaded.branches, loaded.branch_cause, loaded.parent_id) == ([], None, None)


def test_damaged_branch_is_refused() -> None:
    saved = make_trajectory().model_dump(mode="json")
    saved["branches"][1]["loss_mask"].pop()
    with pytest.raises(ValueError, match="different lengths"):
        AsyncRolloutRequest.model_validate(saved)


def test_sequence_without_tokens_or_after_its_end_is_not_set_aside() -> None:
    pending = AsyncRolloutRequest(messages=[HI])
    ended = make_request()
    ended.finish(StopReason.ANSWERED)
    for request in (pending, ended):
        with pytest.raises(LedgerError, match="stays"):
            request.set_aside("compaction")
        assert not request.branches


def test_only_another_finished_request_becomes_a_branch() -> None:
    request, running, ended = make_request(), make_request("running"), make_request("ended")
    ended.finish(StopReason.ANSWERED)
    request.add_branch(ended, "branch")
    for other in (running, ended, request):
        with pytest.raises(LedgerError, match="cannot become a branch"):
            request.add_branch(other, "branch")
    assert request.branches == [ended]
