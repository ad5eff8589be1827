"""PPO's clipped loss and its kin. Shapes: B sequences, T response positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    clamped_log_ratio,
    clip_metrics,
    clip_range,
    where_trained,
)
from agentrl.algorithms.losses.registry import (
    CLIP,
    DEFAULTS,
    DUAL_CLIP,
    LossAndMetrics,
    register_policy_loss,
)
from agentrl.config.schema.run import ActorConfig


@register_policy_loss("vanilla", reads=DUAL_CLIP)
def compute_policy_loss_vanilla(
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
    """Clip the policy's ratio: PPO with separate clips below and above, and the dual clip.

    With ratio r and advantage A, a token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)); where
    A < 0 it is at most -A c.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Ye et al. 2020 (1912.09729), eq. 5, for
    the dual clip; Yu et al. 2025 (2503.14476), section 3.1, for the two clips.

    Returns:
        The loss, and `actor/ppo_kl` (k1 estimate of KL(old, new)), `actor/pg_clipfrac` (share of
        tokens whose ratio is clipped), `actor/pg_clipfrac_lower` (share on the dual clip).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    worst, clipped = clip_surrogate(log_ratio.exp(), advantages, config)
    bound = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(bound, worst), worst)
    lower = (worst > bound) & (advantages < 0)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, clipped, lower)


@register_policy_loss("dr_grpo", loss_agg_mode="seq-mean-token-sum-norm", reads=CLIP)
def compute_policy_loss_dr_grpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum-norm",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Clip the ratio, without the dual clip, and divide by a constant instead of by lengths.

    A token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)); the mini-batch's is their sum over
    sequences and tokens / sequences / response budget. The advantages of the paper are `grpo` with
    `algorithm.norm_adv_by_std_in_grpo: false`.

    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2; TRL's `loss_type="dr_grpo"`.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    losses, clipped = clip_surrogate(log_ratio.exp(), where_trained(advantages, mask), config)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, clipped)


@register_policy_loss("bnpo", loss_agg_mode="token-mean", reads=CLIP)
def compute_policy_loss_bnpo(
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
    """Clip the ratio, without the dual clip, and divide by the trained tokens of the mini-batch.

    TRL divides by the tokens of each micro-batch and averages these means, so that its loss changes
    with the size of a micro-batch (layout is invisible); here the mini-batch is what is divided by.

    Source: TRL's `loss_type="bnpo"`.
    """
    return compute_policy_loss_dr_grpo(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, scale=scale,
    )  # fmt: skip


def clip_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, config: ActorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worse of the free and the clipped loss of each token, and where that is the clipped."""
    low, high = clip_range(config)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), clipped > free
