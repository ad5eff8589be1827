"""Losses as verl 0.9.1 computes them, if that breaks an invariant. For comparisons with verl.

They depend on how a mini-batch is cut into micro-batches, except `sapo_verl`. Shapes: B sequences,
T response positions.
"""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.covariance import CLIP_COV, KL_COV, num_kl_cov, penalize_chosen
from agentrl.algorithms.losses.registry import DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.algorithms.losses.sequence_ratio import geo_mean_metrics, geometric_ratio
from agentrl.algorithms.losses.token_loss import (
    CLIP,
    LossInputs,
    Metrics,
    clip_surrogate,
    register_token_loss,
    row_means,
    where_trained,
)
from agentrl.algorithms.losses.token_ratio import compute_policy_loss_sapo
from agentrl.algorithms.masked import masked_mean
from agentrl.config.schema.training import ActorConfig


@register_policy_loss(
    "sapo_verl",
    loss_agg_mode="seq-mean-token-mean",
    reads=("tau_pos", "tau_neg"),
    only_advantages=True,
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
    """Compute SAPO with `seq-mean-token-mean`, for any `loss_agg_mode`."""
    return compute_policy_loss_sapo(
        old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean", config,
        rollout_is_weights, scale=scale,
    )  # fmt: skip


@register_policy_loss("geo_mean_verl", reads=CLIP, by_row=True)
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
    """Compute GMPO as the mean over the rows of a micro-batch, for any `loss_agg_mode`.

    Rows without a trained token are counted; importance weights enter by their geometric mean.
    """
    x = LossInputs.of(old_log_prob, log_prob, advantages, response_mask, config, scale)
    losses = -row_means(x.advantages, x.mask) * geometric_ratio(x)
    if rollout_is_weights is not None:
        log_weights = torch.log(where_trained(rollout_is_weights, x.mask) + 1e-10)
        losses = losses * row_means(log_weights, x.mask).exp()
    return losses.mean(), geo_mean_metrics(x)


@register_token_loss("clip_cov_verl", reads=CLIP_COV, by_row=True)
def compute_policy_loss_clip_cov_verl(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Compute Clip-Cov with covariances of the micro-batch, and draw tokens between the bounds."""
    worst, clipped = clip_surrogate(x, x.log_ratio.exp())
    covariances, settings = _covariances(x), x.config.policy_loss
    inside = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    num_chosen = max(1, int(settings.clip_cov_ratio * int(x.mask.sum())))
    index = (inside & x.mask & ~clipped).flatten().nonzero().squeeze(-1)
    # From torch's global generator, as in verl.
    drawn = index[torch.randperm(len(index))[:num_chosen].to(index.device)]
    chosen = _is_in(drawn, x.mask)
    return torch.where(chosen, 0.0, worst), x.clip_metrics(chosen, clipped)


@register_token_loss("kl_cov_verl", reads=KL_COV, by_row=True)
def compute_policy_loss_kl_cov_verl(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Compute KL-Cov with covariances of the micro-batch, from the current log-probabilities."""
    num_tokens = int(x.mask.sum())
    flat = torch.where(x.mask, _covariances(x), -torch.inf).flatten()
    highest = flat.topk(min(num_kl_cov(num_tokens, x.config), num_tokens)).indices
    return penalize_chosen(x, _is_in(highest, x.mask).to(x.log_prob.dtype))


def _covariances(x: LossInputs) -> torch.Tensor:
    """Return the covariances of a micro-batch's tokens with the means of the micro-batch."""
    now = x.log_prob.detach()
    return (x.advantages - masked_mean(x.advantages, x.mask)) * (now - masked_mean(now, x.mask))


def _is_in(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor of the shape of `like`, true at a flat index."""
    return torch.zeros_like(like).flatten().index_fill(0, index, True).view_as(like)
