"""RLOO: the other samples of a prompt are the baseline. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("rloo", reads=(), reward_unit="row")
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Take off each score the mean score of the *other* samples of its prompt.

    A_i = score_i - mean of score_j, j != i, = (score_i - mean) n / (n - 1) in a group of n. The
    baseline does not depend on the sample, so the policy gradient is unbiased. A group of equal
    scores or of one gives exactly 0. Arguments and returns are those of `grpo`.

    Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3; Kool et al. 2019.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(leave_one_out(scored))


register_adv_est("rloo_vectorized", reads=(), reward_unit="row")(compute_rloo_outcome_advantage)


def leave_one_out(scored: GroupScores) -> torch.Tensor:
    """`[B]`: score - mean score of the group's other rows."""
    num = scored.num_in_group()
    return scored.silence((scored.scores - scored.mean()) * num / (num - 1).clamp(min=1))
