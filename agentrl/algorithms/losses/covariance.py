"""Losses that hold tokens back by covariance. Shapes: B sequences, T positions, N trained tokens.

The covariance of a token is (log pi_old - its mean) (A - its mean): tokens whose probability and
advantage are both high are those whose update costs entropy. Means and the cut that chooses tokens
are those of the *mini-batch*, over its micro-batches and all ranks. A micro-batch cannot know them,
so they are computed before it, from what is known before any forward pass: the log-probabilities
before the update. (The reference computes them from the current ones, in each micro-batch anew, so
that its loss changes with how the batch is cut; `clip_cov_verl` and `kl_cov_verl` do so too. In the
first optimizer step of a batch the current policy is the old one.)

Log-probabilities of exactly 0 are common in float32, so covariances tie in thousands. Tokens that
tie for the last places share them: each is held back in part, which keeps the share of all tokens
and does not depend on their order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    clamped_log_ratio,
    clip_metrics,
    where_trained,
)
from agentrl.algorithms.losses.registry import (
    CLIP,
    DEFAULTS,
    LossAndMetrics,
    TrainedTokens,
    register_policy_loss,
)
from agentrl.algorithms.losses.token_ratio import clip_surrogate
from agentrl.config.schema.run import ActorConfig
from agentrl.errors import ConfigError

CLIP_COV = (*CLIP, *(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")))
KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
_TIE = 1e-12
"""Covariances this close, by the size of their factors, tie: the order in which a mean is summed
moves them less."""


@dataclass(frozen=True, slots=True)
class CovarianceCut:
    """Which tokens of a mini-batch are held back, as numbers that every micro-batch can apply."""

    mean_log_prob: float
    mean_advantage: float
    least: float = torch.inf
    """Covariance of the last token that is chosen; infinity where there is none."""
    margin: float = 0.0
    """Covariances this close to `least` tie with it."""
    share_of_tied: float = 0.0
    """How far each token that ties is chosen: the places that are left / the tokens that tie."""
    below: float = torch.inf
    """The covariance of a chosen token is less than this."""

    def chosen(
        self, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """How far each token of a micro-batch is chosen, from 0 to 1, `[B, T]` as `advantages`."""
        covariance = (where_trained(log_prob, mask).double() - self.mean_log_prob) * (
            where_trained(advantages, mask).double() - self.mean_advantage
        )
        ties = (covariance - self.least).abs() <= self.margin
        share = torch.where(ties, self.share_of_tied, (covariance > self.least).double())
        return where_trained(share, mask & (covariance < self.below)).to(advantages.dtype)


def cut_for_clip_cov(tokens: TrainedTokens, config: ActorConfig) -> CovarianceCut:
    """Choose the highest covariances within the bounds, a share of all tokens at most."""
    settings = config.policy_loss
    covariances, means = _covariances(tokens)
    inside = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    num_chosen = max(1, int(settings.clip_cov_ratio * len(covariances)))
    cut = _cut_off(covariances[inside], num_chosen, means)
    return replace(cut, below=settings.clip_cov_ub)


def cut_for_kl_cov(tokens: TrainedTokens, config: ActorConfig) -> CovarianceCut:
    """Choose the highest covariances, a share of all tokens."""
    covariances, means = _covariances(tokens)
    return _cut_off(covariances, num_kl_cov(len(covariances), config), means)


def num_kl_cov(num_tokens: int, config: ActorConfig) -> int:
    """Count the tokens that KL-Cov penalises: a share of all, but one at least."""
    return max(1, int(config.policy_loss.kl_cov_ratio * num_tokens))


@register_policy_loss("clip_cov", summarise=cut_for_clip_cov, reads=CLIP_COV)
def compute_policy_loss_clip_cov(
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
    """Clip the ratio, and take a few tokens of high covariance out of the loss (Clip-Cov).

    A token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)), 0 for the chosen tokens: those with
    the highest covariance between `clip_cov_lb` and `clip_cov_ub`, `clip_cov_ratio` of all.

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4, where the tokens are drawn at random
    between the bounds; the draw would depend on the order of the rows (layout is invisible), so the
    highest are taken. Where fewer lie between the bounds than may be chosen, both take them all.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of chosen tokens),
        `actor/pg_clipfrac_lower` (share whose ratio is clipped).
    """
    mask = response_mask.bool()
    cut = _cut(scale, cut_for_clip_cov, old_log_prob, advantages, mask, config)
    scale = scale or LossScale.of(mask)
    chosen = cut.chosen(old_log_prob, advantages, mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    worst, clipped = clip_surrogate(log_ratio.exp(), where_trained(advantages, mask), config)
    chosen = torch.where(clipped, 0.0, chosen)
    loss = scale.aggregate((1 - chosen) * worst, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, chosen, clipped)


@register_policy_loss("kl_cov", summarise=cut_for_kl_cov, reads=KL_COV)
def compute_policy_loss_kl_cov(
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
    """Penalise the log-ratio of the tokens of highest covariance (KL-Cov).

    A token's loss is -A r, plus `ppo_kl_coef` |log r| for the `kl_cov_ratio` of all tokens whose
    covariance is highest. Nothing is clipped.

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/ppo_kl_abs` (mean |log r|), `actor/kl_cov_frac` (share
        of penalised tokens).
    """
    mask = response_mask.bool()
    cut = _cut(scale, cut_for_kl_cov, old_log_prob, advantages, mask, config)
    scale = scale or LossScale.of(mask)
    chosen = cut.chosen(old_log_prob, advantages, mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    losses = penalised_losses(log_ratio, where_trained(advantages, mask), chosen, config)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, kl_cov_metrics(scale, mask, log_ratio, chosen)


def penalised_losses(
    log_ratio: torch.Tensor, advantages: torch.Tensor, chosen: torch.Tensor, config: ActorConfig
) -> torch.Tensor:
    """KL-Cov's loss of each token, once it is known how far each is `chosen`, `[B, T]`."""
    penalty = chosen * config.policy_loss.ppo_kl_coef * log_ratio.abs()
    return penalty - advantages * log_ratio.exp()


def kl_cov_metrics(
    scale: LossScale, mask: torch.Tensor, log_ratio: torch.Tensor, chosen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Parts of KL-Cov's metrics."""
    return {
        "actor/ppo_kl": scale.mean(-log_ratio, mask),
        "actor/ppo_kl_abs": scale.mean(log_ratio.abs(), mask),
        "actor/kl_cov_frac": scale.mean(chosen, mask),
    }


def _cut(
    scale: LossScale | None,
    summarise: Callable[[TrainedTokens, ActorConfig], CovarianceCut],
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: ActorConfig,
) -> CovarianceCut:
    """The mini-batch's cut; without a scale these rows are the whole mini-batch."""
    if scale is None:
        return summarise(TrainedTokens(old_log_prob[mask], advantages[mask]), config)
    if not isinstance(scale.summary, CovarianceCut):
        raise ConfigError(
            "a loss by covariance must know the whole mini-batch, and its scale has no summary",
            expected="a scale from `with_summary`, or none where these rows are the mini-batch",
        )
    return scale.summary


def _covariances(tokens: TrainedTokens) -> tuple[torch.Tensor, CovarianceCut]:
    """`[N]` float64, and a cut that knows the mini-batch's means, with nothing chosen yet."""
    log_probs, advantages = (column.double() for column in tokens)
    if not len(advantages):
        return advantages, CovarianceCut(0.0, 0.0)
    mean_log_prob, mean_advantage = float(log_probs.mean()), float(advantages.mean())
    margin = _TIE * float(log_probs.abs().max() * advantages.abs().max())
    found = (log_probs - mean_log_prob) * (advantages - mean_advantage)
    return found, CovarianceCut(mean_log_prob, mean_advantage, margin=margin)


def _cut_off(covariances: torch.Tensor, count: int, means: CovarianceCut) -> CovarianceCut:
    """Choose the `count` highest; those that tie for the last places share them."""
    if not len(covariances):
        return means
    count = min(count, len(covariances))
    least = float(covariances.topk(count).values[-1])
    tied = (covariances - least).abs() <= means.margin
    left = count - int(((covariances > least) & ~tied).sum())
    return replace(means, least=least, share_of_tied=left / max(1, int(tied.sum())))
