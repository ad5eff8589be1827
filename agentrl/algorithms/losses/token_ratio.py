"""Losses on the ratio of each token. Shapes: B sequences, T response positions.

All take the arguments of `PolicyLossFn`. r is the ratio of the token's probability to that before
the update, A its advantage, sg() stops the gradient, low and high are the clip range.
"""

import torch

from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.algorithms.losses.token_loss import (
    CLIP,
    DUAL_CLIP,
    LossInputs,
    Metrics,
    by_case,
    clip_range,
    clip_surrogate,
    register_token_loss,
)
from agentrl.errors import ConfigError

Losses = tuple[torch.Tensor, Metrics]

_TINY = 1e-8
_MIN_LOG_WEIGHT = -18.420680743952367
"""log(1e-8): below this weight of a sequence VESPO's kernel is constant."""
_VESPO = tuple(
    f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
)


@register_token_loss("vanilla", reads=DUAL_CLIP, only_advantages=True)
def compute_policy_loss_vanilla(x: LossInputs) -> Losses:
    """Clip the policy's ratio: PPO with separate clips below and above, and the dual clip.

    A token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)); if A < 0 it is at most -A c.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Ye et al. 2020 (1912.09729), eq. 5, for
    the dual clip; Yu et al. 2025 (2503.14476), section 3.1, for the two clips.

    Returns:
        The loss, and `actor/ppo_kl` (k1 estimate of KL(old, new)), `actor/pg_clipfrac` (share of
        tokens with a clipped ratio), `actor/pg_clipfrac_lower` (share on the dual clip).
    """
    worst, clipped = clip_surrogate(x, x.log_ratio.exp())
    bound = -x.advantages * x.config.clip_ratio_c
    losses = torch.where(x.advantages < 0, torch.minimum(bound, worst), worst)
    return losses, x.clip_metrics(clipped, (worst > bound) & (x.advantages < 0))


@register_token_loss(
    "dr_grpo", reads=CLIP, loss_agg_mode="seq-mean-token-sum-norm", only_advantages=True
)
def compute_policy_loss_dr_grpo(x: LossInputs) -> Losses:
    """Clip the ratio, without the dual clip, and divide by a constant instead of by lengths.

    A token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)); the mini-batch's is their sum over
    sequences and tokens / sequences / response budget. The advantages of the paper are `grpo` with
    `algorithm.norm_adv_by_std_in_grpo: false`.

    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2; TRL's `loss_type="dr_grpo"`.
    """
    losses, clipped = clip_surrogate(x, x.log_ratio.exp())
    return losses, x.clip_metrics(clipped)


@register_token_loss("bnpo", reads=CLIP, loss_agg_mode="token-mean", only_advantages=True)
def compute_policy_loss_bnpo(x: LossInputs) -> Losses:
    """Clip the ratio, without the dual clip, and divide by the trained tokens of the mini-batch.

    TRL divides by the tokens of each micro-batch and averages these means, so its loss changes with
    the size of a micro-batch. agentrl divides by the tokens of the mini-batch (invariant: layout is
    invisible).

    Source: TRL's `loss_type="bnpo"`.
    """
    losses, clipped = clip_surrogate(x, x.log_ratio.exp())
    return losses, x.clip_metrics(clipped)


@register_token_loss("gpg", reads=(), only_advantages=True)
def compute_policy_loss_gpg(x: LossInputs) -> Losses:
    """Follow the plain policy gradient: no ratio, no clip.

    A token's loss is -A log pi (REINFORCE). Use one optimizer step per batch: the loss does not
    limit how far later steps move the policy.

    Source: Chu et al. 2025 (arXiv 2504.02546); Williams 1992.

    Returns:
        The loss, and `actor/ppo_kl`.
    """
    return -x.advantages * x.log_prob, {"actor/ppo_kl": x.mean(-x.log_ratio)}


@register_token_loss("cispo", reads=CLIP, only_advantages=True)
def compute_policy_loss_cispo(x: LossInputs) -> Losses:
    """Clip the importance weight of the policy gradient, and drop no token.

    A token's loss is -A sg(clip(r, 1 - low, 1 + high)) log pi.

    Source: MiniMax 2025 (arXiv 2506.13585), section 3.1. The paper has no lower bound of the weight
    (`clip_ratio_low: 1`) and tunes `clip_ratio_high` alone.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of tokens with a clipped weight),
        `actor/pg_clipfrac_lower` (0).
    """
    low, high = clip_range(x.config)
    ratio = x.log_ratio.exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return -x.advantages * weight * x.log_prob, x.clip_metrics(ratio != weight)


@register_token_loss("dro", reads=("policy_loss.dro_beta",))
def compute_policy_loss_dro(x: LossInputs) -> Losses:
    """Penalize the square of the log-ratio.

    With d = log pi - log pi_old a token's loss is -A log pi + beta / 2 d^2. The square is not
    clamped: it is the only term that brings a distant token back.

    Source: Richemond et al. 2024 (arXiv 2405.19107), the policy's loss, by token.

    Returns:
        The loss, and `actor/ppo_kl`.

    Raises:
        ConfigError: without `actor.policy_loss.dro_beta`.
    """
    beta = x.config.policy_loss.dro_beta
    if beta is None:
        raise ConfigError(
            "the policy loss dro has no default for the weight of its penalty",
            key="actor.policy_loss.dro_beta",
            expected="a positive number",
        )
    penalty = 0.5 * beta * (x.log_prob - x.old_log_prob).square()
    return penalty - x.advantages * x.log_prob, {"actor/ppo_kl": x.mean(-x.log_ratio)}


@register_token_loss(
    "sapo", reads=("tau_pos", "tau_neg"), default_mode="seq-mean-token-mean", only_advantages=True
)
def compute_policy_loss_sapo(x: LossInputs) -> Losses:
    """Pass the ratio through a sigmoid with slope 1 at a ratio of 1 (SAPO).

    A token's loss is -A (4 / tau) sigmoid(tau (r - 1)), with `tau_pos` if A > 0 and `tau_neg`
    otherwise.

    Source: Gao et al. 2025 (arXiv 2511.20347). The paper's aggregation is `seq-mean-token-mean`;
    verl's loss, which ignores the mode, is `sapo_verl`.
    """
    tau = x.by_sign(x.config.tau_pos, x.config.tau_neg)
    gate = torch.sigmoid(tau * (x.log_ratio.exp() - 1)) * 4 / tau
    return -x.advantages * gate, x.clip_metrics(torch.zeros_like(x.mask))


@register_token_loss("vespo", reads=_VESPO, only_advantages=True, by_row=True)
def compute_policy_loss_vespo(x: LossInputs) -> Losses:
    """Weight each sequence's policy gradient by a kernel of its whole ratio, without clip (VESPO).

    With W the product of a sequence's ratios, a token's loss is -A sg(phi(W)) log pi, where
    phi(W) = W^k exp(lambda (1 - W)) is 1 at W = 1 and decreases on both sides; k and lambda depend
    on the sign of A.

    Source: Shen et al. 2026 (arXiv 2602.10693), the kernel that the variational problem gives; the
    settings and clamps are those of TRL's `loss_type="vespo"`. TRL also multiplies W by the
    importance weights between engine and trainer; here `rollout_is_weights` multiply the loss, as
    in every loss.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/vespo_phi` (mean weight of a token).
    """
    settings, log_ratio = x.config.policy_loss, x.log_ratio.detach()
    # In logs, because W overflows.
    log_weight = log_ratio.sum(dim=-1, keepdim=True).clamp(_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    rises = x.advantages >= 0
    k = by_case(rises, settings.vespo_k_pos, settings.vespo_k_neg, log_ratio)
    decay = by_case(rises, settings.vespo_lambda_pos, settings.vespo_lambda_neg, log_ratio)
    phi = (k * log_weight - decay * torch.expm1(log_weight)).exp()
    metrics = {"actor/ppo_kl": x.mean(-x.log_ratio), "actor/vespo_phi": x.mean(phi)}
    return -x.advantages * phi * x.log_prob, metrics


@register_token_loss("dppo_tv", reads=DUAL_CLIP, only_advantages=True)
def compute_policy_loss_dppo_tv(x: LossInputs) -> Losses:
    """Drop tokens that would leave a region of total variation around the old policy (DPPO).

    A token's loss is -A sg(min(r, c)) log pi; it is 0 if A > 0 and pi - pi_old > high, or if A <= 0
    and pi_old - pi > low. `clip_ratio_low` and `clip_ratio_high` are bounds of the difference of
    probabilities here, not of the ratio.

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary approximation of total variation,
    with min(r, c), where c (`clip_ratio_c`) should be large: 20 in verl.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of dropped tokens),
        `actor/pg_clipfrac_lower` (share of kept tokens with a ratio cut to c).
    """
    low, high = clip_range(x.config)
    rise = (x.log_prob.exp() - x.old_log_prob.exp()).detach()
    return _dppo(x, torch.where(x.advantages > 0, rise <= high, rise >= -low))


@register_token_loss("dppo_kl", reads=DUAL_CLIP, only_advantages=True)
def compute_policy_loss_dppo_kl(x: LossInputs) -> Losses:
    """Drop tokens that would leave a region of KL divergence around the old policy (DPPO).

    As `dppo_tv`, with the KL between two coins of bias pi_old and pi: a token is dropped if this KL
    exceeds `clip_ratio_high` (A > 0 and pi > pi_old) or `clip_ratio_low` (A <= 0 and pi < pi_old).

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary approximation of the KL.

    Returns:
        As `dppo_tv`.
    """
    low, high = clip_range(x.config)
    old, new = x.old_log_prob, x.log_prob.detach()
    old_prob, prob = old.exp(), new.exp()
    others = torch.log((1 - old_prob + _TINY) / (1 - prob + _TINY))
    divergence = old_prob * (old - new) + (1 - old_prob) * others
    bound = by_case(x.advantages > 0, high, low, divergence)
    returns = torch.where(x.advantages > 0, x.log_ratio <= 0, x.log_ratio >= 0)
    return _dppo(x, (divergence <= bound) | returns)


def _dppo(x: LossInputs, kept: torch.Tensor) -> Losses:
    """Weight the tokens that are `kept`, `[B, T]` bool, by min(r, c); drop the others."""
    ratio, bound = x.log_ratio.exp().detach(), x.config.clip_ratio_c
    weight = torch.where(kept, ratio.clamp(max=bound), 0.0)
    return -x.advantages * weight * x.log_prob, x.clip_metrics(~kept, (ratio > bound) & kept)
