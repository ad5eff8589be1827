"""Losses that are a weighted log-likelihood. Shapes: B sequences, T response positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    clamped_log_ratio,
    clip_metrics,
    clip_range,
    where_trained,
)
from agentrl.algorithms.losses.registry import CLIP, DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.config.schema.run import ActorConfig
from agentrl.errors import ConfigError


@register_policy_loss("gpg", reads=())
def compute_policy_loss_gpg(
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
    """Follow the plain policy gradient: no ratio, no clip.

    A token's loss is -A log pi (REINFORCE). It is meant for one optimizer step a batch: nothing
    holds a second one back.

    Source: Chu et al. 2025 (arXiv 2504.02546); Williams 1992.

    Returns:
        The loss, and `actor/ppo_kl`.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    losses = -where_trained(advantages, mask) * where_trained(log_prob, mask)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    return loss, {"actor/ppo_kl": scale.mean(-log_ratio, mask)}


@register_policy_loss("cispo", reads=CLIP)
def compute_policy_loss_cispo(
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
    """Clip the importance weight of the policy gradient, and drop no token.

    A token's loss is -A sg(clip(r, 1 - low, 1 + high)) log pi.

    Source: MiniMax 2025 (arXiv 2506.13585), section 3.1. The paper does not bound the weight from
    below (`clip_ratio_low: 1`) and tunes `clip_ratio_high` alone.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of tokens whose weight is clipped),
        `actor/pg_clipfrac_lower` (0).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    low, high = clip_range(config)
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    losses = -where_trained(advantages, mask) * weight * where_trained(log_prob, mask)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, ratio != weight)


@register_policy_loss("dro", reads=("policy_loss.dro_beta",))
def compute_policy_loss_dro(
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
    """Pull the policy towards the old one by the square of the log-ratio.

    With d = log pi - log pi_old a token's loss is -A log pi + beta / 2 d^2. The square is not
    clamped: it is the only thing that brings a token back from far away.

    Source: Richemond et al. 2024 (arXiv 2405.19107), the policy's loss, by token.

    Returns:
        The loss, and `actor/ppo_kl`.

    Raises:
        ConfigError: without `actor.policy_loss.dro_beta`.
    """
    beta = config.policy_loss.dro_beta
    if beta is None:
        raise ConfigError(
            "dro has no default for the weight of its penalty",
            key="actor.policy_loss.dro_beta",
            expected="a positive number",
        )
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_prob, old_log_prob = where_trained(log_prob, mask), where_trained(old_log_prob, mask)
    penalty = 0.5 * beta * (log_prob - old_log_prob).square()
    losses = penalty - where_trained(advantages, mask) * log_prob
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    return loss, {"actor/ppo_kl": scale.mean(-log_ratio, mask)}
