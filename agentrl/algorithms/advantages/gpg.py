"""GPG: plain group policy gradient, rescaled for the batch. Shapes: B rows, T positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("gpg", reads=(), reward_unit="row")
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Centre each score in its group, and scale up for the rows of the batch that scored nothing.

    A = alpha (score - mean) / f_norm with alpha = rows / rows whose score is not 0, over the rows
    of the whole batch that count. A group of equal scores or of one gives exactly 0. Arguments
    (but `f_norm`, which all advantages are divided by) and returns are those of `grpo`.

    Source: Chu et al. 2025 (arXiv 2504.02546), section 2.2, with the alpha of verl 0.9.1. The
    paper's (equation 7) is groups / groups *whose scores differ*: the share of groups that give a
    gradient. This one depends on where the rewards' zero lies, and grows as scores of 0 do. A KL in
    the reward leaves hardly any score at exactly 0, and alpha near 1.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scale_by_scored_rows(scored, f_norm))


def scale_by_scored_rows(scored: GroupScores, f_norm: float) -> torch.Tensor:
    """`[B]`: alpha (score - mean) / f_norm."""
    counted = scored.groups.counted
    num_scored = (counted & (scored.scores != 0)).sum().clamp(min=1)
    alpha = counted.sum().double() / num_scored
    return scored.silence(alpha * (scored.scores - scored.mean()) / f_norm)
