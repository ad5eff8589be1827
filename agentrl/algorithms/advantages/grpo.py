"""GRPO and Dr.GRPO. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("grpo", reads=(), reward_unit="row")
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Compare each sample's score with the other samples of its prompt.

    A = (score - mean) / (std + epsilon) on every trained token; with
    `norm_adv_by_std_in_grpo: false`, A = score - mean. A group whose scores are all equal, or in
    which one row counts, trains on nothing: its advantages are exactly 0 (equal rewards train
    nothing).

    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (2503.20783), for
    Dr.GRPO: `norm_adv_by_std_in_grpo: false` with `loss_agg_mode: seq-mean-token-sum-norm`.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        index: `[B]`, the group of each row.
        epsilon: Added to the standard deviation. (Other estimators take it, and `config`, for the
            convention where they do not read them.)
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        config: Taken for the convention of estimators; not read.
        in_baseline: `[B]` bool, rows that the group's statistics count; the others, and rows in
            which nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 on masked positions.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(normalise(scored, epsilon) if norm_adv_by_std_in_grpo else centre(scored))


# One function under two names: a second one, vectorised, is what other systems need.
register_adv_est("grpo_vectorized", reads=(), reward_unit="row")(compute_grpo_outcome_advantage)


def centre(scored: GroupScores) -> torch.Tensor:
    """`[B]`: score - mean of the group."""
    return scored.silence(scored.scores - scored.mean())


def normalise(scored: GroupScores, epsilon: float) -> torch.Tensor:
    """`[B]`: (score - mean) / (std + epsilon) of the group."""
    return scored.silence((scored.scores - scored.mean()) / (scored.std() + epsilon))
