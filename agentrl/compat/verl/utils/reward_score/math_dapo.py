"""`verl.utils.reward_score.math_dapo`: 1 for a right answer, -1 for every other."""

from typing import Any

from agentrl.compat.verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from agentrl.rewards import math_dapo
from agentrl.rewards.math_answer import normalize_answer as normalize_final_answer

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Score a solution (see `agentrl.rewards.math_dapo.compute_score`)."""
    found = math_dapo.compute_score(
        "math_dapo", solution_str, ground_truth, strict_box_verify=strict_box_verify
    )
    return {"score": found["score"], "acc": bool(found["acc"]), "pred": found["pred"] or None}
