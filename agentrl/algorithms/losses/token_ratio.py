"""PPO's clipped loss and its kin. Shapes: B sequences, T response positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.algorithms.losses.ratio import (
    by_case,
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
from agentrl.config.schema.run import ActorConfig, PolicyLossConfig
from agentrl.errors import ConfigError


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
    with the size of a micro-batch (law 10); here the mini-batch is what is divided by.

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
