"""OPO: a baseline that weighs samples by length. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("opo", reads=(), reward_unit="row")
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Take off each score its group's mean score, weighted by the number of trained tokens.

    A_i = score_i - (sum of length_j score_j) / (sum of length_j) over the group. This is the
    baseline of least variance where every token's gradient has the same norm and those of
    different tokens are orthogonal. A group of equal scores or of one gives exactly 0. Arguments
    and returns are those of `grpo`.

    Source: Hao et al. 2025 (arXiv 2505.23585), section 2 (the optimal reward baseline).
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scored.silence(scored.scores - length_weighted_mean(scored)))


def length_weighted_mean(scored: GroupScores) -> torch.Tensor:
    """`[B]`: the mean over the trained tokens of each row's group of the score of their row."""
    groups, lengths = scored.groups, scored.lengths.double()
    totals = groups.sum(lengths).clamp(min=1)
    return (groups.sum(lengths * scored.scores) / totals)[groups.rows]
