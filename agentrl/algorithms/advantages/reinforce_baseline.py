"""REINFORCE++ with a group baseline. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.grpo import centre
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("reinforce_plus_plus_baseline", reads=(), reward_unit="row")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Centre each score in its group, then whiten over the trained tokens of the whole batch.

    A = whiten(score - mean of the group). Groups share one scale, unlike in `grpo`. The shift of
    whitening would give a group of equal scores, or of one, an advantage again; here it stays
    exactly 0 (equal rewards train nothing), while its tokens count in the batch's mean and
    variance. Arguments and returns are those of `grpo`.

    Source: Hu et al. 2025 (arXiv 2501.03262), REINFORCE++-baseline.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scored.silence(scored.whiten(centre(scored))))
