"""From the finished requests of a validation set to its figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.rollout.request import AsyncRolloutRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one validation request; what ranks send each other."""

    success: bool
    reward: float
    num_turns: int
    used_tool: bool
    failed: bool
    num_response_tokens: int


def read_outcome(request: AsyncRolloutRequest) -> Outcome:
    """Reduce a request to what validation counts; one that failed is no success."""
    return Outcome(
        success=is_success(request),
        reward=request.reward or 0.0,
        num_turns=len(request.turns),
        used_tool=any(call.outcome == "ok" for turn in request.turns for call in turn.calls),
        failed=request.error is not None,
        num_response_tokens=request.num_response_tokens,
    )


def is_success(request: AsyncRolloutRequest) -> bool:
    """Whether a request solved its problem: what the scorer says under `success`, else reward > 0.

    A scorer that pays for good form alone should say `success` itself.
    """
    said = request.reward_extra_info.get("success")
    return bool(said) if said is not None else (request.reward or 0.0) > 0


def validation_metrics(name: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Average the outcomes of the validation set `name`, under `val/<name>/`."""
    count = len(outcomes)
    if not count:
        return {}
    return {
        f"val/{name}/success": sum(o.success for o in outcomes) / count,
        f"val/{name}/reward/mean": sum(o.reward for o in outcomes) / count,
        f"val/{name}/num_turns/mean": sum(o.num_turns for o in outcomes) / count,
        f"val/{name}/used_tool": sum(o.used_tool for o in outcomes) / count,
        f"val/{name}/failed": sum(o.failed for o in outcomes) / count,
        f"val/{name}/response_length/mean": sum(o.num_response_tokens for o in outcomes) / count,
        f"val/{name}/num": float(count),
    }
