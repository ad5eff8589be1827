"""The states of a request, the legal edges between them, and the ways in which it can end.

This file is the whole state machine: a table of edges, a table of ends, no I/O. The diagram in the
documentation is drawn from `TRANSITIONS` by `state_diagram`.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from agentrl.errors import Fault, TransitionError


class RequestState(StrEnum):
    """Where a request stands."""

    PENDING = "pending"
    """Made, not yet started: its tools and interaction do not exist."""
    RUNNING = "running"
    """The policy is asked for its next turn."""
    TOOL_CALLING = "tool_calling"
    """The calls of the last turn are being executed."""
    INTERACTING = "interacting"
    """The last answer is before the simulated user."""
    COMPLETED = "completed"
    """Ended as a result of what the policy did; scored and trained."""
    FAILED = "failed"
    """Ended by something that is not the policy's doing; its row is kept and masked."""


_S = RequestState

TRANSITIONS: MappingProxyType[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.RUNNING, _S.FAILED}),
        _S.RUNNING: frozenset({_S.TOOL_CALLING, _S.INTERACTING, _S.COMPLETED, _S.FAILED}),
        _S.TOOL_CALLING: frozenset({_S.RUNNING, _S.COMPLETED, _S.FAILED}),
        _S.INTERACTING: frozenset({_S.RUNNING, _S.COMPLETED, _S.FAILED}),
        _S.COMPLETED: frozenset({_S.FAILED}),  # only where its scorer breaks
        _S.FAILED: frozenset(),
    }
)
"""Every legal edge. One method of `AsyncRolloutRequest` follows them; nothing else does."""

FINAL_STATES = frozenset({_S.COMPLETED, _S.FAILED})
"""States in which nothing more is generated."""


class StopReason(StrEnum):
    """Why a request ended. Every finished request has exactly one."""

    ANSWERED = "answered"
    """The policy ended its turn without a call, and nobody had anything to add."""
    TOOL_ENDED = "tool_ended"
    """A tool said that the request is over."""
    INTERACTION_ENDED = "interaction_ended"
    """The interaction said that the conversation is over."""
    MALFORMED_CALL = "malformed_call"
    """A malformed call under the policy `on_malformed_call: stop` (or `stop_unreadable`)."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The policy had as many turns as it may have, and wanted more."""
    MAX_USER_TURNS = "max_user_turns"
    """The interaction had as many replies as it may have."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The policy asked for more tool calls than it may make."""
    RESPONSE_BUDGET = "response_budget"
    """The response reached its tokens, or the next observation would not fit into them."""
    MODEL_LENGTH = "model_length"
    """Prompt and response reached the model's length."""
    WALL_CLOCK = "wall_clock"
    """The request's time was up."""
    ABORTED = "aborted"
    """The run cancelled the request."""
    FAILED = "failed"
    """Something that the request depends on broke; `error` says what."""


class End(NamedTuple):
    """What a stop reason means for the rest of the data's way."""

    state: RequestState
    fault: Fault | None
    """Whose doing it is; None where nothing went wrong, or (FAILED) where `error` says."""
    in_baseline: bool
    """Whether the group's statistics count the request."""
    trained: bool
    """Whether its sampled tokens enter the loss."""


_BY_THE_MODEL = End(_S.COMPLETED, Fault.MODEL, in_baseline=True, trained=True)
_AS_IT_SHOULD = End(_S.COMPLETED, None, in_baseline=True, trained=True)
_BY_THE_HOUSE = End(_S.FAILED, Fault.LIMIT, in_baseline=False, trained=False)

ENDS: MappingProxyType[StopReason, End] = MappingProxyType(
    {
        StopReason.ANSWERED: _AS_IT_SHOULD,
        StopReason.TOOL_ENDED: _AS_IT_SHOULD,
        StopReason.INTERACTION_ENDED: _AS_IT_SHOULD,
        StopReason.MALFORMED_CALL: _BY_THE_MODEL,
        StopReason.MAX_ASSISTANT_TURNS: _BY_THE_MODEL,
        StopReason.MAX_USER_TURNS: _BY_THE_MODEL,
        StopReason.MAX_TOOL_CALLS: _BY_THE_MODEL,
        StopReason.RESPONSE_BUDGET: _BY_THE_MODEL,
        StopReason.MODEL_LENGTH: _BY_THE_MODEL,
        StopReason.WALL_CLOCK: _BY_THE_HOUSE,
        StopReason.ABORTED: _BY_THE_HOUSE,
        StopReason.FAILED: End(_S.FAILED, None, in_baseline=False, trained=False),
    }
)
"""For each stop reason: the final state, whose fault, in the group's baseline or not, trained or
not. Limits of turns, tokens and calls are the model's; the wall clock is not."""


def check_edge(source: RequestState, target: RequestState) -> None:
    """Refuse an edge that the table does not have.

    Raises:
        TransitionError: naming both states and the edges that there are.
    """
    if target not in TRANSITIONS[source]:
        raise TransitionError(
            f"no edge from {source} to {target}",
            expected=", ".join(sorted(TRANSITIONS[source])) or "nothing: the request has ended",
        )


def check_end(reason: StopReason, *, is_explained: bool) -> RequestState:
    """Give the state in which a reason ends a request.

    Args:
        reason: Why it ends.
        is_explained: Whether an error says what broke.

    Raises:
        TransitionError: for a failure without an error, or an error without a failure (a failed
        request is data).
    """
    state = ENDS[reason].state
    if is_explained is not (state is RequestState.FAILED):
        expected = "an error" if not is_explained else "no error"
        raise TransitionError(f"{reason} ends a request as {state}", expected=expected)
    return state


def state_diagram() -> str:
    """Draw the table of edges as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for source, targets in TRANSITIONS.items():
        lines += [f"    {source} --> {target}" for target in _S if target in targets]
    lines += [f"    {end} --> [*]" for end in _S if end in FINAL_STATES]
    return "\n".join(lines)
