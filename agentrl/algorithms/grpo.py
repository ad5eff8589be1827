"""Group-relative advantages. Shapes: B rows, T response positions."""

import numpy as np
import torch

from agentrl.algorithms.advantages import register_adv_est
from agentrl.algorithms.groups import Groups, compute_outcome_scores
from agentrl.config.schema import AlgorithmConfig

AdvantagesAndReturns = tuple[torch.Tensor, torch.Tensor]


@register_adv_est("grpo")
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
    which one row counts, trains on nothing: its advantages are exactly 0 (law 9).

    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (2503.20783), for
    Dr.GRPO: `norm_adv_by_std_in_grpo: false` with `loss_agg_mode: seq-mean-token-sum-norm`.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        index: `[B]`, the group of each row.
        epsilon: Added to the standard deviation.
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        config: Taken for the convention of estimators; not read.
        in_baseline: `[B]` bool, rows that the group's statistics count; the others, and rows in
            which nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 on masked positions.
    """
    mask = response_mask.bool()
    scores = compute_outcome_scores(token_level_rewards, mask)
    groups = Groups.of(index, _counted(mask, in_baseline))
    relative = _relative_scores(scores, groups, epsilon, norm_adv_by_std_in_grpo)
    return _on_tokens(relative, mask, token_level_rewards.dtype)


@register_adv_est("grpo_verl_singleton")
def compute_grpo_verl_singleton_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `grpo`, but train a group of one on its raw score, as the reference does.

    Such a group has no baseline: its mean is taken as 0 and its standard deviation as 1. For
    comparisons with the reference; parameters and returns are those of `grpo`.
    """
    mask = response_mask.bool()
    scores = compute_outcome_scores(token_level_rewards, mask)
    groups = Groups.of(index, _counted(mask, in_baseline))
    relative = _relative_scores(scores, groups, epsilon, norm_adv_by_std_in_grpo)
    raw = scores / (1 + epsilon) if norm_adv_by_std_in_grpo else scores
    alone = (groups.count() == 1)[groups.rows] & groups.counted
    return _on_tokens(torch.where(alone, raw, relative), mask, token_level_rewards.dtype)


def _counted(mask: torch.Tensor, in_baseline: torch.Tensor | None) -> torch.Tensor:
    trained = mask.any(dim=-1)
    return trained if in_baseline is None else trained & in_baseline.bool()


def _relative_scores(
    scores: torch.Tensor, groups: Groups, epsilon: float, divide: bool
) -> torch.Tensor:
    """Centre scores `[B]` (float64) in their groups; exactly 0 where that says nothing."""
    relative = scores - groups.mean(scores)[groups.rows]
    if divide:
        relative = relative / (groups.std(scores)[groups.rows] + epsilon)
    says_nothing = groups.is_constant(scores)[groups.rows] | ~groups.counted
    return torch.where(says_nothing, 0.0, relative)


def _on_tokens(
    values: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> AdvantagesAndReturns:
    advantages = torch.where(mask, values[:, None].to(dtype), 0.0)
    return advantages, advantages
