"""The states of a request, the legal edges between them, and what each stop reason means.

This file is the whole state machine: a table of edges and a table of ends, without I/O.
The figure of the documentation is drawn from `TRANSITIONS`.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from agentrl.errors import Fault, TransitionError


class RequestState(StrEnum):
    """What a request is doing."""

    PENDING = "pending"
    """Not yet started. Its tools and interaction do not exist."""
    RUNNING = "running"
    """The policy generates its next turn."""
    TOOL_CALLING = "tool_calling"
    """The calls of the last turn are being executed."""
    INTERACTING = "interacting"
    """The interaction replies to the last answer."""
    COMPLETED = "completed"
    """Ended as a result of what the policy did. It is scored and trained."""
    FAILED = "failed"
    """Ended by something that the policy did not cause. Its row is kept and masked."""


_S = RequestState

TRANSITIONS: MappingProxyType[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.RUNNING, _S.FAILED}),
        _S.RUNNING: frozenset({_S.TOOL_CALLING, _S.INTERACTING, _S.COMPLETED, _S.FAILED}),
        _S.TOOL_CALLING: frozenset({_S.RUNNING, _S.COMPLETED, _S.FAILED}),
        _S.INTERACTING: frozenset({_S.RUNNING, _S.COMPLETED, _S.FAILED}),
        _S.COMPLETED: frozenset({_S.FAILED}),  # only if its scoring fails
        _S.FAILED: frozenset(),
    }
)
"""Every legal edge. Only one method of `AsyncRolloutRequest` changes the state."""

FINAL_STATES = frozenset({_S.COMPLETED, _S.FAILED})
"""States in which nothing more is generated."""


class StopReason(StrEnum):
    """Why a request ended. Every finished request has exactly one."""

    ANSWERED = "answered"
    """The policy answered without a tool call, and no interaction replied."""
    TOOL_ENDED = "tool_ended"
    """A tool ended the request."""
    INTERACTION_ENDED = "interaction_ended"
    """The interaction ended the conversation."""
    MALFORMED_CALL = "malformed_call"
    """A malformed call under the policy `on_malformed_call: stop` (or `stop_unreadable`)."""
    SAMPLED_PLACEHOLDER = "sampled_placeholder"
    """The policy sampled a token that stands for an image or a video. Engines cannot continue such
    a sequence."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """The policy used all its turns and needed another one."""
    MAX_USER_TURNS = "max_user_turns"
    """The interaction used all its replies."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The policy asked for more tool calls than allowed."""
    RESPONSE_BUDGET = "response_budget"
    """The response reached its token budget, or the next observation does not fit into it."""
    MODEL_LENGTH = "model_length"
    """Prompt and response reached the length of the model."""
    CONTINUED = "continued"
    """The sequence was set aside, and its trajectory continues in another sequence. Only branches
    end so."""
    WALL_CLOCK = "wall_clock"
    """The request ran out of time."""
    ABORTED = "aborted"
    """The run cancelled the request."""
    FAILED = "failed"
    """A tool, an interaction, the engine or the scorer failed; see `error`."""


class End(NamedTuple):
    """What a stop reason means for scoring and training."""

    state: RequestState
    fault: Fault | None
    """Who caused the end. None if nothing went wrong, and for FAILED (see the `error`)."""
    in_baseline: bool
    """Whether the statistics of the group count the request."""
    trained: bool
    """Whether the sampled tokens enter the loss."""


_MODEL = End(_S.COMPLETED, Fault.MODEL, in_baseline=True, trained=True)
_SUCCESS = End(_S.COMPLETED, None, in_baseline=True, trained=True)
_INFRASTRUCTURE = End(_S.FAILED, Fault.LIMIT, in_baseline=False, trained=False)

ENDS: MappingProxyType[StopReason, End] = MappingProxyType(
    {
        StopReason.ANSWERED: _SUCCESS,
        StopReason.TOOL_ENDED: _SUCCESS,
        StopReason.INTERACTION_ENDED: _SUCCESS,
        StopReason.MALFORMED_CALL: _MODEL,
        StopReason.SAMPLED_PLACEHOLDER: _MODEL,
        StopReason.MAX_ASSISTANT_TURNS: _MODEL,
        StopReason.MAX_USER_TURNS: _MODEL,
        StopReason.MAX_TOOL_CALLS: _MODEL,
        StopReason.RESPONSE_BUDGET: _MODEL,
        StopReason.MODEL_LENGTH: _MODEL,
        StopReason.CONTINUED: _SUCCESS,
        StopReason.WALL_CLOCK: _INFRASTRUCTURE,
        StopReason.ABORTED: _INFRASTRUCTURE,
        StopReason.FAILED: End(_S.FAILED, None, in_baseline=False, trained=False),
    }
)
"""What each stop reason means. Limits of turns, tokens and calls are the model's fault; the wall
clock is not."""


def check_edge(source: RequestState, target: RequestState) -> None:
    """Check that the table has an edge.

    Raises:
        TransitionError: If it does not. The error names both states and the existing edges.
    """
    if target not in TRANSITIONS[source]:
        raise TransitionError(
            f"no edge from {source} to {target}",
            expected=", ".join(sorted(TRANSITIONS[source])) or "nothing: the request has ended",
        )


def check_end(reason: StopReason, *, has_error: bool) -> RequestState:
    """Return the final state for a stop reason.

    Args:
        reason: Why the request ends.
        has_error: Whether the request has an error.

    Raises:
        TransitionError: If a failure has no error, or a completion has one.
    """
    state = ENDS[reason].state
    if has_error is not (state is RequestState.FAILED):
        expected = "an error" if not has_error else "no error"
        raise TransitionError(f"{reason} ends a request as {state}", expected=expected)
    return state
