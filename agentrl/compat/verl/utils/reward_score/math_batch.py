"""`verl.utils.reward_score.math_batch`: a scorer for the manager `batch`."""

from collections.abc import Sequence
from typing import Any

from agentrl.compat.verl.utils.reward_score.math_reward import compute_score


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
) -> list[float]:
    """Score many solutions."""
    return [compute_score(*one) for one in zip(solution_strs, ground_truths, strict=True)]
