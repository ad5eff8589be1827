"""Losses with a trust region of a divergence (DPPO). Shapes: B sequences, T positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    by_case,
    clamped_log_ratio,
    clip_metrics,
    clip_range,
    where_trained,
)
from agentrl.algorithms.losses.registry import (
    DEFAULTS,
    DUAL_CLIP,
    LossAndMetrics,
    register_policy_loss,
)
from agentrl.config.schema.run import ActorConfig

_TINY = 1e-8


@register_policy_loss("dppo_tv", reads=DUAL_CLIP)
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Drop tokens that would leave a region of total variation around the old policy.

    A token's loss is -A sg(min(r, c)) log pi, 0 where A > 0 and pi - pi_old > high, or where A <= 0
    and pi_old - pi > low. `clip_ratio_low` and `clip_ratio_high` are bounds of the difference of
    probabilities here, not of the ratio.

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary approximation of total variation,
    with min(r, c), where c (`clip_ratio_c`) should be large: 20 in verl.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of dropped tokens),
        `actor/pg_clipfrac_lower` (share of kept tokens whose ratio is cut to c).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    new, old = where_trained(log_prob, mask), where_trained(old_log_prob, mask)
    advantages, (low, high) = where_trained(advantages, mask), clip_range(config)
    rise = (new.exp() - old.exp()).detach()
    kept = torch.where(advantages > 0, rise <= high, rise >= -low)
    weight, cut = _truncated_ratio(log_ratio, kept, config)
    loss = scale.aggregate(-advantages * weight * new, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, ~kept, cut)


@register_policy_loss("dppo_kl", reads=DUAL_CLIP)
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Drop tokens that would leave a region of KL divergence around the old policy.

    As `dppo_tv`, with the KL between two coins of bias pi_old and pi: a token is dropped where that
    exceeds `clip_ratio_high` (A > 0 and pi > pi_old) or `clip_ratio_low` (A <= 0 and pi < pi_old).

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary approximation of the KL.

    Returns:
        As `dppo_tv`.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    new, old = where_trained(log_prob, mask), where_trained(old_log_prob, mask)
    advantages, (low, high) = where_trained(advantages, mask), clip_range(config)
    divergence = _binary_kl(old, new.detach())
    bound = by_case(advantages > 0, high, low, divergence)
    returns = torch.where(advantages > 0, log_ratio <= 0, log_ratio >= 0)
    kept = (divergence <= bound) | returns
    weight, cut = _truncated_ratio(log_ratio, kept, config)
    loss = scale.aggregate(-advantages * weight * new, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, ~kept, cut)


def _binary_kl(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """KL between "this token or another" under both policies, from log-probabilities `[B, T]`."""
    old_prob, prob = old.exp(), new.exp()
    others = torch.log((1 - old_prob + _TINY) / (1 - prob + _TINY))
    return old_prob * (old - new) + (1 - old_prob) * others


def _truncated_ratio(
    log_ratio: torch.Tensor, kept: torch.Tensor, config: ActorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stopped weight min(r, c) of tokens that are kept, and where it is c, `[B, T]` each."""
    ratio = log_ratio.exp().detach()
    weight = torch.where(kept, ratio.clamp(max=config.clip_ratio_c), 0.0)
    return weight, (ratio > config.clip_ratio_c) & kept
