"""Losses that restrict tokens by covariance. Shapes: B sequences, T positions, N trained tokens.

The covariance of a token is (log pi_old - its mean) (A - its mean). Updates of tokens whose
probability and advantage are both high reduce the entropy most. Means and the cut that chooses
tokens are those of the *mini-batch*, over its micro-batches and all ranks. A micro-batch cannot
compute them, so they are computed before the update, from the log-probabilities before the update.
(verl computes them from the current ones, in each micro-batch, so its loss depends on the
micro-batches; `clip_cov_verl` and `kl_cov_verl` do so too. In the first optimizer step of a batch
the current policy is the old one.)

Log-probabilities of exactly 0 are common in float32, so thousands of covariances may be equal.
Tokens that tie for the last of the chosen ones are all chosen in part. This keeps the share of all
tokens and does not depend on their order.
"""

from dataclasses import dataclass, replace

import torch

from agentrl.algorithms.losses.registry import TrainedTokens
from agentrl.algorithms.losses.token_loss import (
    CLIP,
    LossInputs,
    Metrics,
    clip_surrogate,
    register_token_loss,
    where_trained,
)
from agentrl.config.schema.training import ActorConfig
from agentrl.errors import ConfigError

CLIP_COV = (*CLIP, *(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")))
KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
_TIE = 1e-12
"""Covariances tie if they differ by at most this, relative to the size of their factors. The order
in which a mean is summed changes them by less."""


@dataclass(frozen=True, slots=True)
class CovarianceCut:
    """The choice of a mini-batch's tokens, as numbers that every micro-batch can apply."""

    mean_log_prob: float
    mean_advantage: float
    least: float = torch.inf
    """Covariance of the last chosen token; infinity if there is none."""
    margin: float = 0.0
    """Covariances this close to `least` tie with it."""
    share_of_tied: float = 0.0
    """Weight of each tied token: number of tied tokens to choose / number of tied tokens."""
    below: float = torch.inf
    """The covariance of a chosen token is less than this."""

    def chosen(
        self, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the weight, 0 to 1, with which each token is chosen, `[B, T]` as `advantages`."""
        covariance = (where_trained(log_prob, mask).double() - self.mean_log_prob) * (
            where_trained(advantages, mask).double() - self.mean_advantage
        )
        ties = (covariance - self.least).abs() <= self.margin
        share = torch.where(ties, self.share_of_tied, (covariance > self.least).double())
        return where_trained(share, mask & (covariance < self.below)).to(advantages.dtype)


def cut_for_clip_cov(tokens: TrainedTokens, config: ActorConfig) -> CovarianceCut:
    """Choose the highest covariances within the bounds, at most a share of all tokens."""
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
    """Count the tokens that KL-Cov penalizes: a share of all, but at least one."""
    return max(1, int(config.policy_loss.kl_cov_ratio * num_tokens))


@register_token_loss("clip_cov", reads=CLIP_COV, summarise=cut_for_clip_cov, only_advantages=True)
def compute_policy_loss_clip_cov(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Clip the ratio, and remove a few tokens of high covariance from the loss (Clip-Cov).

    A token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)), 0 for the chosen tokens: those with
    the highest covariance between `clip_cov_lb` and `clip_cov_ub`, `clip_cov_ratio` of all.

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4, which draws the tokens at random
    between the bounds. The draw would depend on the order of the rows, so the highest are taken
    here. If fewer are between the bounds than may be chosen, both methods take them all.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/pg_clipfrac` (share of chosen tokens),
        `actor/pg_clipfrac_lower` (share with a clipped ratio).
    """
    worst, clipped = clip_surrogate(x, x.log_ratio.exp())
    chosen = torch.where(clipped, 0.0, _chosen(x))
    return (1 - chosen) * worst, x.clip_metrics(chosen, clipped)


@register_token_loss("kl_cov", reads=KL_COV, summarise=cut_for_kl_cov)
def compute_policy_loss_kl_cov(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """Penalize the log-ratio of the tokens of highest covariance (KL-Cov).

    A token's loss is -A r, plus `ppo_kl_coef` |log r| for the `kl_cov_ratio` of all tokens whose
    covariance is highest. There is no clip.

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.

    Returns:
        The loss, and `actor/ppo_kl`, `actor/ppo_kl_abs` (mean |log r|), `actor/kl_cov_frac` (share
        of penalized tokens).
    """
    return penalize_chosen(x, _chosen(x))


def penalize_chosen(x: LossInputs, chosen: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """Compute KL-Cov's loss and metrics from the weight with which each token is chosen."""
    penalty = chosen * x.config.policy_loss.ppo_kl_coef * x.log_ratio.abs()
    return penalty - x.advantages * x.log_ratio.exp(), {
        "actor/ppo_kl": x.mean(-x.log_ratio),
        "actor/ppo_kl_abs": x.mean(x.log_ratio.abs()),
        "actor/kl_cov_frac": x.mean(chosen),
    }


def _chosen(x: LossInputs) -> torch.Tensor:
    if not isinstance(x.scale.summary, CovarianceCut):
        raise ConfigError(
            "a loss by covariance needs the cut of the whole mini-batch, and its scale has none",
            expected="a scale from `with_summary`, or no scale if these rows are the mini-batch",
        )
    return x.scale.summary.chosen(x.old_log_prob, x.advantages, x.mask)


def _covariances(tokens: TrainedTokens) -> tuple[torch.Tensor, CovarianceCut]:
    """Return the covariances, `[N]` float64, and a cut with their means that chooses nothing."""
    log_probs, advantages = (column.double() for column in tokens)
    if not len(advantages):
        return advantages, CovarianceCut(0.0, 0.0)
    mean_log_prob, mean_advantage = float(log_probs.mean()), float(advantages.mean())
    margin = _TIE * float(log_probs.abs().max() * advantages.abs().max())
    found = (log_probs - mean_log_prob) * (advantages - mean_advantage)
    return found, CovarianceCut(mean_log_prob, mean_advantage, margin=margin)


def _cut_off(covariances: torch.Tensor, count: int, means: CovarianceCut) -> CovarianceCut:
    """Choose the `count` highest; tokens that tie for the last of them are chosen in part."""
    if not len(covariances):
        return means
    count = min(count, len(covariances))
    least = float(covariances.topk(count).values[-1])
    tied = (covariances - least).abs() <= means.margin
    left = count - int(((covariances > least) & ~tied).sum())
    return replace(means, least=least, share_of_tied=left / max(1, int(tied.sum())))
