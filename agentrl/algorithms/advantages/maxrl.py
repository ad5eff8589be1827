"""MaxRL: towards maximum likelihood of success. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig
from agentrl.errors import ConfigError


@register_adv_est("maxrl", reads=(), reward_unit="row")
def compute_maxrl_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Centre each score in its group and divide by the group's mean score.

    A = (score - mean) / (mean + epsilon). For rewards of 0 and 1 and n samples its expectation is
    the gradient of log P(success), developed in powers of P(failure) and cut after n - 1 terms;
    the first term is P(success), which `rloo` and Dr.GRPO follow. A prompt that is solved once in
    n weighs n times. A group of equal scores or of one gives exactly 0. Arguments and returns are
    those of `grpo`.

    Source: Tajwar, Zeng et al. 2026 (arXiv 2602.02710), algorithm 1, without its factor 1 / n,
    which is the aggregation's.

    Raises:
        ConfigError: for a negative score. The mean of such a group may be 0 or below, where
            dividing by it blows the advantage up or turns its sign.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    if (scored.groups.counted & (scored.scores < 0)).any():
        raise ConfigError(
            "'maxrl' divides by the mean score of a group, and a score is negative",
            key="algorithm.adv_estimator",
            expected="rewards of 0 and above (and no use_kl_in_reward), or another estimator",
        )
    means = scored.mean()
    return scored.spread(scored.silence((scored.scores - means) / (means + epsilon)))
