"""Losses whose ratio is a sequence's. Shapes: B sequences, T response positions.

The ratio is taken over the trained tokens of one *row*. Where a trajectory stands in several rows,
each has a ratio of its own; `LossScale.row_weights` keeps their weight, not their ratio, together.
"""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    MAX_SEQUENCE_LOG_RATIO,
    clamped_log_ratio,
    clip_metrics,
    clip_range,
    row_means,
    where_trained,
)
from agentrl.algorithms.losses.registry import CLIP, DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.algorithms.losses.token_ratio import clip_surrogate
from agentrl.config.schema.run import ActorConfig


@register_policy_loss("gspo", reads=CLIP)
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Clip the ratio of the sequence: the geometric mean of its tokens' ratios.

    With s = exp(mean log-ratio of the sequence) a token's loss is max(-A s_t, -A clip(s_t, 1 - low,
    1 + high)), where s_t = sg(s) pi / sg(pi) has the value s and the gradient s grad log pi.

    Source: Zheng et al. 2025 (arXiv 2507.18071), section 4.1 for the ratio, section 4.3 for s_t,
    with which advantages may differ from token to token. The paper's aggregation is
    `seq-mean-token-mean`.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of tokens in clipped sequences),
        `actor/pg_clipfrac_lower` (0: there is no second bound).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_prob, old_log_prob = where_trained(log_prob, mask), where_trained(old_log_prob, mask)
    sequence = row_means(log_prob - old_log_prob, mask).detach()
    straight = log_prob - log_prob.detach() + sequence
    ratio = straight.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    losses, clipped = clip_surrogate(ratio, where_trained(advantages, mask), config)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    return loss, clip_metrics(scale, mask, log_ratio, clipped)


@register_policy_loss("luspo", loss_agg_mode="seq-mean-token-sum", reads=CLIP)
def compute_policy_loss_luspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Multiply GSPO's loss of each sequence by its length, so that length has no price.

    A sequence's loss in GSPO is the mean over its tokens; times its length it is their sum, so this
    is `gspo` under `seq-mean-token-sum`.

    Source: Liu et al. 2026 (arXiv 2602.05261); TRL's `loss_type="luspo"` with
    `importance_sampling_level="sequence"`.
    """
    return compute_policy_loss_gspo(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, scale=scale,
    )  # fmt: skip


@register_policy_loss("geo_mean", reads=CLIP)
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Clip each token's log-ratio, then take the geometric mean over the sequence (GMPO).

    With d the log-ratio, a token's is min(d, high) where A > 0, max(d, -low) where A < 0, 0 where
    A = 0. The sequence's ratio is g = exp(mean of these); a token's loss is -A g. The clips are of
    the *log*-ratio: the paper's 0.4 bounds the ratio by exp(-0.4) and exp(0.4).

    Source: Zhao et al. 2025 (arXiv 2507.20673). The paper's aggregation is `seq-mean-token-mean`;
    the reference's loss, deaf to the mode, is `geo_mean_verl`.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` (shares of
        tokens outside the clips with positive and with negative advantage).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    losses = -advantages * geometric_ratio(log_ratio, advantages, mask, config)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, geo_mean_metrics(scale, mask, log_ratio, advantages, config)


def geometric_ratio(
    log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ActorConfig
) -> torch.Tensor:
    """GMPO's ratio of each sequence, `[B, 1]`, with gradient."""
    low, high = clip_range(config)
    sign = advantages.sign()
    clamped = log_ratio.clamp(-low, high)
    return row_means(sign * torch.minimum(sign * log_ratio, sign * clamped), mask).exp()


def geo_mean_metrics(
    scale: LossScale,
    mask: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    config: ActorConfig,
) -> dict[str, torch.Tensor]:
    """GMPO's shares of tokens outside the clips, by the sign of the advantage."""
    low, high = clip_range(config)
    outside = (log_ratio < -low) | (log_ratio > high)
    return clip_metrics(
        scale, mask, log_ratio, outside & (advantages > 0), outside & (advantages < 0)
    )
