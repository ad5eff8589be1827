"""Losses as the reference (verl 0.9.1) computes them, where that breaks an invariant of ours.

They are here so that a run can be repeated to the digit. All of them depend on how a mini-batch is
cut into micro-batches, except `sapo_verl`. Shapes: B sequences, T response positions.
"""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.covariance import (
    CLIP_COV,
    KL_COV,
    kl_cov_metrics,
    num_kl_cov,
    penalised_losses,
)
from agentrl.algorithms.losses.ratio import (
    clamped_log_ratio,
    clip_metrics,
    row_means,
    where_trained,
)
from agentrl.algorithms.losses.registry import CLIP, DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.algorithms.losses.sequence_ratio import geo_mean_metrics, geometric_ratio
from agentrl.algorithms.losses.token_ratio import clip_surrogate, compute_policy_loss_sapo
from agentrl.algorithms.masked import masked_mean
from agentrl.config.schema.run import ActorConfig


@register_policy_loss(
    "sapo_verl", loss_agg_mode="seq-mean-token-mean", reads=("tau_pos", "tau_neg")
)
def compute_policy_loss_sapo_verl(
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
    """SAPO with `seq-mean-token-mean`, whatever `loss_agg_mode` says."""
    return compute_policy_loss_sapo(
        old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean", config,
        rollout_is_weights, scale=scale,
    )  # fmt: skip


@register_policy_loss("geo_mean_verl", reads=CLIP)
def compute_policy_loss_geo_mean_verl(
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
    """GMPO as the mean over the rows of a micro-batch, whatever `loss_agg_mode` says.

    Rows that train on nothing are counted; importance weights enter by their geometric mean.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    losses = -row_means(advantages, mask) * geometric_ratio(log_ratio, advantages, mask, config)
    if rollout_is_weights is not None:
        log_weights = torch.log(where_trained(rollout_is_weights, mask) + 1e-10)
        losses = losses * row_means(log_weights, mask).exp()
    return losses.mean(), geo_mean_metrics(scale, mask, log_ratio, advantages, config)


@register_policy_loss("clip_cov_verl", reads=CLIP_COV)
def compute_policy_loss_clip_cov_verl(
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
    """Clip-Cov with covariances of the micro-batch, tokens drawn at random between the bounds."""
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    worst, clipped = clip_surrogate(log_ratio.exp(), advantages, config)
    now = where_trained(log_prob, mask).detach()
    covariances = _covariances(now, advantages, mask)
    settings = config.policy_loss
    inside = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    num_chosen = max(1, int(settings.clip_cov_ratio * int(mask.sum())))
    chosen = _draw(inside & mask & ~clipped, num_chosen)
    losses = torch.where(chosen, 0.0, worst)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, chosen, clipped)


@register_policy_loss("kl_cov_verl", reads=KL_COV)
def compute_policy_loss_kl_cov_verl(
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
    """KL-Cov with covariances of the micro-batch, of the current log-probabilities."""
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    now = where_trained(log_prob, mask).detach()
    advantages = where_trained(advantages, mask)
    covariances = _covariances(now, advantages, mask)
    chosen = _highest(covariances, mask, num_kl_cov(int(mask.sum()), config)).to(now.dtype)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    losses = penalised_losses(log_ratio, advantages, chosen, config)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, kl_cov_metrics(scale, mask, log_ratio, chosen)


def _covariances(
    log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Of the tokens of a micro-batch for itself, `[B, T]`."""
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _highest(covariances: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest among the trained tokens, `[B, T]` bool; ties as they come."""
    flat = torch.where(mask, covariances, -torch.inf).flatten()
    places = flat.topk(min(count, int(mask.sum()))).indices
    return torch.zeros_like(mask).flatten().index_fill(0, places, True).view_as(mask)


def _draw(among: torch.Tensor, count: int) -> torch.Tensor:
    """Draw `count` of the true places, `[B, T]` bool, from torch's global generator."""
    places = among.flatten().nonzero().squeeze(-1)
    drawn = places[torch.randperm(len(places))[:count].to(places.device)]
    return torch.zeros_like(among).flatten().index_fill(0, drawn, True).view_as(among)
