"""The budgets of a request that count turns, calls and replies, and how one turn is bounded."""

from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason


def turn_limit(request: AsyncRolloutRequest) -> int:
    """Tokens that the next turn may sample."""
    left = request.num_tokens_left
    return min(left, request.budgets.max_turn_tokens or left)


def why_not_call(request: AsyncRolloutRequest, num_calls: int) -> StopReason | None:
    """The limit that `num_calls` more calls, and a turn behind them, would cross; None: none."""
    limit = request.budgets.max_tool_calls
    if limit is not None and request.num_tool_calls + num_calls > limit:
        return StopReason.MAX_TOOL_CALLS
    return why_not_continue(request)


def why_not_reply(request: AsyncRolloutRequest) -> StopReason | None:
    """The limit that one more reply, and a turn behind it, would cross; None: none."""
    limit = request.budgets.max_user_turns
    if limit is not None and request.num_user_turns >= limit:
        return StopReason.MAX_USER_TURNS
    return why_not_continue(request)


def why_not_continue(request: AsyncRolloutRequest) -> StopReason | None:
    """The limit that one more turn of the policy would cross; None: none."""
    limit = request.budgets.max_assistant_turns
    if limit is not None and request.num_assistant_turns >= limit:
        return StopReason.MAX_ASSISTANT_TURNS
    return None
