"""Losses that hold tokens back by covariance. Shapes: B sequences, T positions, N trained tokens.

The covariance of a token is (log pi_old - its mean) (A - its mean): tokens whose probability and
advantage are both high are those whose update costs entropy. Means and the cut that chooses tokens
are those of the *mini-batch*, over its micro-batches and all ranks. A micro-batch cannot know them,
so they are computed before it, from what is known before any forward pass: the log-probabilities
before the update. (The reference computes them from the current ones, in each micro-batch anew, so
that its loss changes with how the batch is cut; `clip_cov_verl` and `kl_cov_verl` do so too. In the
first optimizer step of a batch the current policy is the old one.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import (
    clamped_log_ratio,
    clip_metrics,
    where_trained,
)
from agentrl.algorithms.losses.registry import (
    DEFAULTS,
    LossAndMetrics,
    TrainedTokens,
    register_policy_loss,
)
from agentrl.algorithms.losses.vanilla import clip_surrogate
from agentrl.config.schema import ActorConfig
from agentrl.errors import ConfigError

_TIE = 1e-9
"""Covariances this close, relative, tie: the order in which a mean is summed moves them less."""


@dataclass(frozen=True, slots=True)
class CovarianceCut:
    """Which tokens of a mini-batch are held back, as numbers that every micro-batch can apply."""

    mean_log_prob: float
    mean_advantage: float
    at_least: float
    """Least covariance of a chosen token; those that tie with it are chosen too."""
    below: float = torch.inf
    """The covariance of a chosen token is less than this."""

    def chosen(
        self, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Choose among the tokens of a micro-batch, `[B, T]` each."""
        covariance = (where_trained(log_prob, mask).double() - self.mean_log_prob) * (
            where_trained(advantages, mask).double() - self.mean_advantage
        )
        return mask & (covariance >= self.at_least) & (covariance < self.below)


def cut_for_clip_cov(tokens: TrainedTokens, config: ActorConfig) -> CovarianceCut:
    """Choose the highest covariances within the bounds, a share of all tokens at most."""
    settings = config.policy_loss
    cut = _means(tokens)
    covariances = _covariances(tokens, cut)
    inside = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    num_chosen = max(1, int(settings.clip_cov_ratio * len(covariances)))
    at_least = _highest(covariances[inside], num_chosen)
    return CovarianceCut(cut.mean_log_prob, cut.mean_advantage, at_least, settings.clip_cov_ub)


def cut_for_kl_cov(tokens: TrainedTokens, config: ActorConfig) -> CovarianceCut:
    """Choose the highest covariances, a share of all tokens."""
    cut = _means(tokens)
    covariances = _covariances(tokens, cut)
    num_chosen = max(1, int(config.policy_loss.kl_cov_ratio * len(covariances)))
    return CovarianceCut(cut.mean_log_prob, cut.mean_advantage, _highest(covariances, num_chosen))


@register_policy_loss("clip_cov", summarise=cut_for_clip_cov)
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
    between the bounds; the draw would depend on the order of the rows (law 10), so the highest
    are taken. Where fewer lie between the bounds than may be chosen, both take them all.

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
    chosen = chosen & ~clipped
    losses = torch.where(chosen, 0.0, worst)
    loss = scale.aggregate(losses, mask, loss_agg_mode, rollout_is_weights)
    return loss, clip_metrics(scale, mask, log_ratio, chosen, clipped)


@register_policy_loss("kl_cov", summarise=cut_for_kl_cov)
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
    """KL-Cov's loss of each token, once the tokens are `chosen`, `[B, T]` bool."""
    penalty = torch.where(chosen, config.policy_loss.ppo_kl_coef * log_ratio.abs(), 0.0)
    return penalty - advantages * log_ratio.exp()


def kl_cov_metrics(
    scale: LossScale, mask: torch.Tensor, log_ratio: torch.Tensor, chosen: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Parts of KL-Cov's metrics."""
    return {
        "actor/ppo_kl": scale.mean(-log_ratio, mask),
        "actor/ppo_kl_abs": scale.mean(log_ratio.abs(), mask),
        "actor/kl_cov_frac": scale.mean(chosen.float(), mask),
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


def _means(tokens: TrainedTokens) -> CovarianceCut:
    """The mini-batch's means, with nothing chosen yet."""
    count = max(1, len(tokens.advantages))
    sums = [float(column.double().sum()) for column in tokens]
    return CovarianceCut(sums[0] / count, sums[1] / count, torch.inf)


def _covariances(tokens: TrainedTokens, means: CovarianceCut) -> torch.Tensor:
    return (tokens.old_log_prob.double() - means.mean_log_prob) * (
        tokens.advantages.double() - means.mean_advantage
    )


def _highest(covariances: torch.Tensor, count: int) -> float:
    """The least of the `count` highest, and what ties with it; infinity where there is none."""
    if not len(covariances):
        return torch.inf
    least = float(covariances.topk(min(count, len(covariances))).values[-1])
    return least - _TIE * abs(least)
