"""Random walks through the real runner: the invariants at every step, engine call and end."""

from collections import Counter
from typing import get_args

import pytest

from agentrl.config.schema.reward import Placement
from agentrl.engines.protocol import FinishReason
from agentrl.errors import Fault
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.plugins import assert_invariants, check_life
from tests.fakes.random_conversations import SeededConversation, WatchedRequest, run_conversation
from tests.fakes.request_model import FAILURES, assert_rewards_land
from tests.fakes.requests import weighted

FAULTS = {
    Fault.ENGINE: {"EngineError", "RuntimeError", "TimeoutError", "LedgerError"},
    Fault.TOOL: {"ToolLifeError"},
    Fault.INTERACTION: {"InteractionError"},
    Fault.LIMIT: {"CancelledError", "EngineAbortError", "TimeoutError", "DataError"},
}
"""What may fail a conversation, by fault: only what the random fakes raise."""


def assert_ended_as_planned(played: SeededConversation) -> None:
    """Check four invariants at the end, among them "a failed request is data"."""
    request = played.request
    assert_invariants(request, played.engine)
    assert played.complaints == []
    _assert_explained(played)
    _assert_cuts_are_recorded(request)
    for tool in played.tools:
        check_life(tool.lives, "create", "release")
    check_life(played.user.lives, "start", "finalize")
    request.reward = 0.75
    for placement in get_args(Placement):
        config = weighted(0.5, tool=0.25, placement=placement)
        assert_rewards_land(request, request.model, config)


def _assert_explained(played: SeededConversation) -> None:
    """A failed request is data: one reason, and it is that of what happened."""
    request, reason = played.request, played.request.stop_reason
    assert reason is not None
    assert (str(reason) in FAILURES) == (request.state is RequestState.FAILED)
    calls = [call for turn in request.turns for call in turn.calls]
    last = request.turns[-1] if request.turns else None
    match reason:
        case StopReason.MAX_TOOL_CALLS:
            assert len(calls) > (request.budgets.max_tool_calls or 0)
        case StopReason.MAX_ASSISTANT_TURNS:
            assert request.num_assistant_turns == request.budgets.max_assistant_turns
        case StopReason.MAX_USER_TURNS:
            assert request.num_user_turns == request.budgets.max_user_turns
        case StopReason.WALL_CLOCK:
            assert request.budgets.timeout_s is not None
        case StopReason.ABORTED:
            was_aborted = last is not None and last.finish_reason is FinishReason.ABORT
            assert was_aborted or played.was_cancelled
        case StopReason.ANSWERED | StopReason.INTERACTION_ENDED:
            assert last is not None
            assert last.role == "assistant"
        case _:
            pass
    if request.error is not None:
        # An invariant that breaks inside the runner is a failure too: it must not pass for
        # another's.
        assert request.error.kind in FAULTS[request.error.fault], request.error.traceback
        assert request.error.kind != "LedgerError" or played.engine.broke
        assert (request.error.fault is Fault.LIMIT) >= (reason is not StopReason.FAILED)


def _assert_cuts_are_recorded(request: WatchedRequest) -> None:
    """Budgets are separate: what was cut says by which budget."""
    for turn in request.turns:
        for call in turn.calls:
            assert call.num_tokens <= request.budgets.max_observation_tokens
        if turn.role == "user":
            assert (turn.cut == "observation") == (turn.num_cut_tokens > 0)
    ends = {StopReason.RESPONSE_BUDGET, StopReason.MODEL_LENGTH}
    cut = [turn.cut for turn in request.turns if turn.cut in ("response", "model")]
    assert len(cut) <= 1
    if cut and request.error is None:
        assert request.stop_reason in ends


def walk_many(seeds: range) -> Counter[str]:
    """Run the conversations of these seeds; return how often each event happened, with `steps`."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            played = run_conversation(seed)
            assert_ended_as_planned(played)
        except Exception as error:
            raise AssertionError(f"the conversation of seed {seed}") from error
        found[str(played.request.stop_reason)] += 1
        found["steps"] += played.request.num_steps
        found["engine calls"] += len(played.engine.records)
    print(dict(found))
    return found


def test_invariants_hold_in_random_conversations() -> None:
    assert walk_many(range(120))["steps"] >= 600


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_invariants_hold_for_thirty_thousand_steps_of_the_runner() -> None:
    found = walk_many(range(1000, 6000))
    assert found["steps"] >= 30_000
    # Not those of a sequence that was set aside, and of models that read images.
    ends = set(StopReason) - {StopReason.CONTINUED, StopReason.SAMPLED_PLACEHOLDER}
    assert set(map(str, ends)) <= found.keys()
