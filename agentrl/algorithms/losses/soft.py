"""Losses that fade a ratio out instead of clipping it. Shapes: B sequences, T positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.algorithms.losses.ratio import (
    by_case,
    clamped_log_ratio,
    clip_metrics,
    where_trained,
)
from agentrl.algorithms.losses.registry import DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.config.schema.run import ActorConfig, PolicyLossConfig

_VESPO = tuple(
    f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
)


@register_policy_loss("sapo", reads=("tau_pos", "tau_neg"))
def compute_policy_loss_sapo(
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
    """Pass the ratio through a sigmoid whose slope is 1 where the policies agree.

    A token's loss is -A (4 / tau) sigmoid(tau (r - 1)), with `tau_pos` where A > 0 and `tau_neg`
    elsewhere.

    Source: Gao et al. 2025 (arXiv 2511.20347). The paper's aggregation is `seq-mean-token-mean`;
    the reference's loss, deaf to the mode, is `sapo_verl`.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    tau = by_case(advantages > 0, config.tau_pos, config.tau_neg, log_ratio)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    loss = scale.aggregate(-advantages * gate, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, torch.zeros_like(mask))


@register_policy_loss("vespo", reads=_VESPO)
def compute_policy_loss_vespo(
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
    """Weigh each sequence's policy gradient by a kernel of its whole ratio, without clip.

    With W the product of a sequence's ratios, a token's loss is -A sg(phi(W)) log pi, where
    phi(W) = W^k exp(lambda (1 - W)) is 1 at W = 1 and fades on both sides; k and lambda depend on
    the sign of A.

    Source: Shen et al. 2026 (arXiv 2602.10693), the kernel that the variational problem gives; the
    settings and clamps are those of TRL's `loss_type="vespo"`. There W is also multiplied by the
    importance weights between engine and trainer, inside the kernel; here `rollout_is_weights`
    multiply the loss, as in every loss.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/vespo_phi` (mean weight of a token).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    advantages = where_trained(advantages, mask)
    phi = _gamma_kernel(log_ratio.detach(), advantages, config.policy_loss)
    losses = -advantages * phi * where_trained(log_prob, mask)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, {
        "actor/ppo_kl": scale.mean(-log_ratio, mask),
        "actor/vespo_phi": scale.mean(phi, mask),
    }


_MIN_LOG_WEIGHT = -18.420680743952367
"""log(1e-8): below this weight of a sequence the kernel stands still."""


def _gamma_kernel(
    log_ratio: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossConfig
) -> torch.Tensor:
    """Phi of each token's sequence, `[B, T]`: computed in logs, because W overflows."""
    log_weight = log_ratio.sum(dim=-1, keepdim=True).clamp(_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    rises = advantages >= 0
    k = by_case(rises, settings.vespo_k_pos, settings.vespo_k_neg, log_ratio)
    decay = by_case(rises, settings.vespo_lambda_pos, settings.vespo_lambda_neg, log_ratio)
    return (k * log_weight - decay * torch.expm1(log_weight)).exp()
