"""Losses on the ratio of a whole sequence. Shapes: B sequences, T response positions.

The ratio is taken over the trained tokens of one row. If several rows of a trajectory are trained,
the ratios would depend on their number: the update refuses them (`by_row`).
"""

import torch

from agentrl.algorithms.losses.token_loss import (
    CLIP,
    LossInputs,
    Metrics,
    clip_range,
    clip_surrogate,
    register_token_loss,
    row_means,
)

MAX_SEQUENCE_LOG_RATIO = 10.0
"""The mean log-ratio of a sequence is clamped to at most this before it is exponentiated."""


def _compute_gspo(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    sequence = row_means(x.log_prob - x.old_log_prob, x.mask).detach()
    log_ratio = x.log_prob - x.log_prob.detach() + sequence
    losses, clipped = clip_surrogate(x, log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp())
    return losses, x.clip_metrics(clipped)


@register_token_loss(
    "gspo", reads=CLIP, default_mode="seq-mean-token-mean", only_advantages=True, by_row=True
)
def compute_policy_loss_gspo(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Clip the ratio of the sequence: the geometric mean of its tokens' ratios (GSPO).

    With s = exp(mean log-ratio of the sequence) a token's loss is max(-A s_t, -A clip(s_t, 1 - low,
    1 + high)), where s_t = sg(s) pi / sg(pi) has the value s and the gradient s grad log pi.

    Source: Zheng et al. 2025 (arXiv 2507.18071), section 4.1 for the ratio, section 4.3 for s_t,
    with which advantages may differ from token to token. The paper's aggregation is
    `seq-mean-token-mean`.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of tokens in clipped sequences),
        `actor/pg_clipfrac_lower` (0: there is no second bound).
    """
    return _compute_gspo(x)


@register_token_loss(
    "luspo", reads=CLIP, loss_agg_mode="seq-mean-token-sum", only_advantages=True, by_row=True
)
def compute_policy_loss_luspo(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Multiply GSPO's loss of each sequence by its length, so that length has no cost (LUSPO).

    A sequence's loss in GSPO is the mean over its tokens; times its length it is their sum. So this
    is `gspo` with `seq-mean-token-sum`.

    Source: Liu et al. 2026 (arXiv 2602.05261); TRL's `loss_type="luspo"` with
    `importance_sampling_level="sequence"`.
    """
    return _compute_gspo(x)


@register_token_loss(
    "geo_mean", reads=CLIP, default_mode="seq-mean-token-mean", only_advantages=True, by_row=True
)
def compute_policy_loss_geo_mean(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Clip each token's log-ratio, then take the geometric mean over the sequence (GMPO).

    With d the log-ratio, a token's is min(d, high) if A > 0, max(d, -low) if A < 0, 0 if A = 0. The
    sequence's ratio is g = exp(mean of these); a token's loss is -A g. The clips are of the
    *log*-ratio: the paper's 0.4 bounds the ratio by exp(-0.4) and exp(0.4).

    Source: Zhao et al. 2025 (arXiv 2507.20673). The paper's aggregation is `seq-mean-token-mean`;
    verl's loss, which ignores the mode, is `geo_mean_verl`.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` (shares of
        tokens outside the clips with positive and with negative advantage).
    """
    return -x.advantages * geometric_ratio(x), geo_mean_metrics(x)


def geometric_ratio(x: LossInputs) -> torch.Tensor:
    """Return GMPO's ratio of each sequence, `[B, 1]`, with gradient."""
    low, high = clip_range(x.config)
    sign = x.advantages.sign()
    clamped = x.log_ratio.clamp(-low, high)
    return row_means(sign * torch.minimum(sign * x.log_ratio, sign * clamped), x.mask).exp()


def geo_mean_metrics(x: LossInputs) -> Metrics:
    """Return GMPO's shares of tokens outside the clips, by the sign of the advantage."""
    low, high = clip_range(x.config)
    outside = (x.log_ratio < -low) | (x.log_ratio > high)
    return x.clip_metrics(outside & (x.advantages > 0), outside & (x.advantages < 0))
