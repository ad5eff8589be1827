"""Estimators that compare the samples of one prompt. Shapes: B rows, T response positions.

If all scores of a group are equal, or only one row of it counts, its advantages are exactly 0
(invariant: equal rewards train nothing).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError

RowFormula = Callable[[GroupScores], torch.Tensor]


def row_estimator(formula: RowFormula) -> Callable[..., AdvantagesAndReturns]:
    """Make an estimator from a formula for the advantage of each row, `[B]`.

    The estimator takes the arguments of `compute_grpo_outcome_advantage`, and does not read
    `epsilon` and `config`.
    """

    def estimator(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray | torch.Tensor,
        epsilon: float = 1e-6,
        config: AlgorithmConfig | None = None,
        in_baseline: torch.Tensor | None = None,
    ) -> AdvantagesAndReturns:
        scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
        return scored.spread(formula(scored))

    # Not `functools.wraps`: the registry reads the signature of the estimator, not the formula's.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(estimator, name, getattr(formula, name))
    return estimator


@register_adv_est("grpo", reads=(), reward_unit="row")
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Compare each sample's score with the other samples of its prompt (GRPO, Dr.GRPO).

    A = (score - mean) / (std + epsilon) on every trained token; with
    `norm_adv_by_std_in_grpo: false`, A = score - mean.

    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (2503.20783), for
    Dr.GRPO: `norm_adv_by_std_in_grpo: false` with `loss_agg_mode: seq-mean-token-sum-norm`.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        index: `[B]`, the group of each row.
        epsilon: Added to the standard deviation.
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        config: Not read; estimators take it by convention.
        in_baseline: `[B]` bool, rows that the group's statistics count. The others, and rows
            without a trained token, have no effect on them. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 at masked positions.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(relative_scores(scored, epsilon if norm_adv_by_std_in_grpo else None))


# verl has a second, vectorized implementation under this name. Here both are the same function.
register_adv_est("grpo_vectorized", reads=(), reward_unit="row")(compute_grpo_outcome_advantage)


def relative_scores(scored: GroupScores, epsilon: float | None) -> torch.Tensor:
    """Return `[B]`: (score - mean) / (std + epsilon) of the group; None: score - mean."""
    centered = scored.scores - scored.mean()
    return scored.silence(centered if epsilon is None else centered / (scored.std() + epsilon))


@register_adv_est("rloo", reads=(), reward_unit="row")
@row_estimator
def compute_rloo_outcome_advantage(scored: GroupScores) -> torch.Tensor:
    """Subtract from each score the mean score of the *other* samples of its prompt (RLOO).

    A_i = score_i - mean of score_j, j != i, = (score_i - mean) n / (n - 1) in a group of n. The
    baseline does not depend on the sample, so the policy gradient is unbiased. Arguments and
    returns are those of `grpo`.

    Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3; Kool et al. 2019.
    """
    return leave_one_out(scored)


register_adv_est("rloo_vectorized", reads=(), reward_unit="row")(compute_rloo_outcome_advantage)


def leave_one_out(scored: GroupScores) -> torch.Tensor:
    """Return `[B]`: score - mean score of the group's other rows."""
    num = scored.num_in_group()
    return scored.silence((scored.scores - scored.mean()) * num / (num - 1).clamp(min=1))


@register_adv_est("opo", reads=(), reward_unit="row")
@row_estimator
def compute_opo_outcome_advantage(scored: GroupScores) -> torch.Tensor:
    """Subtract from each score its group's mean score, weighted by the number of trained tokens.

    A_i = score_i - (sum of length_j score_j) / (sum of length_j) over the group. This baseline has
    the least variance if every token's gradient has the same norm and the gradients of different
    tokens are orthogonal. Arguments and returns are those of `grpo`.

    Source: Hao et al. 2025 (arXiv 2505.23585), section 2 (the optimal reward baseline).
    """
    return scored.silence(scored.scores - length_weighted_mean(scored))


def length_weighted_mean(scored: GroupScores) -> torch.Tensor:
    """Return `[B]`: the mean score of each row's group, weighted by trained tokens."""
    groups, lengths = scored.groups, scored.lengths.double()
    totals = groups.sum(lengths).clamp(min=1)
    return (groups.sum(lengths * scored.scores) / totals)[groups.rows]


@register_adv_est("gpg", reads=(), reward_unit="row")
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Center each score in its group, and scale up by the share of rows with a score of 0 (GPG).

    A = alpha (score - mean) / f_norm with alpha = rows / rows with a score other than 0, over the
    counted rows of the whole batch. Other arguments and returns are those of `grpo`; `epsilon` is
    not read.

    Source: Chu et al. 2025 (arXiv 2504.02546), section 2.2, with the alpha of verl 0.9.1. The
    paper's alpha (equation 7) is groups / groups *whose scores differ*: the inverse share of groups
    that give a gradient. The alpha used here depends on the zero of the rewards, and grows with the
    number of scores of 0. With a KL in the reward hardly any score is exactly 0, and alpha is
    near 1.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scale_by_scored_rows(scored, f_norm))


def scale_by_scored_rows(scored: GroupScores, f_norm: float) -> torch.Tensor:
    """Return `[B]`: alpha (score - mean) / f_norm."""
    counted = scored.groups.counted
    num_scored = (counted & (scored.scores != 0)).sum().clamp(min=1)
    alpha = counted.sum().double() / num_scored
    return scored.silence(alpha * (scored.scores - scored.mean()) / f_norm)


@register_adv_est("maxrl", reads=(), reward_unit="row")
def compute_maxrl_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Center each score in its group and divide by the group's mean score (MaxRL).

    A = (score - mean) / (mean + epsilon). For rewards of 0 and 1 and n samples its expectation is
    the gradient of log P(success), as a series in powers of P(failure) cut after n - 1 terms; the
    first term is P(success), whose gradient `rloo` and Dr.GRPO follow. A prompt that is solved once
    in n samples has n times the weight. Arguments and returns are those of `grpo`.

    Source: Tajwar, Zeng et al. 2026 (arXiv 2602.02710), algorithm 1, without its factor 1 / n,
    which belongs to the aggregation.

    Raises:
        ConfigError: for a negative score. The mean of such a group may be 0 or below; division by
            it makes the advantage very large or changes its sign.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    if (scored.groups.counted & (scored.scores < 0)).any():
        raise ConfigError(
            "'maxrl' divides by the mean score of a group, and a score is negative",
            key="algorithm.adv_estimator",
            expected="rewards of 0 and above (and no use_kl_in_reward), or another estimator",
        )
    means = scored.mean()
    return scored.spread(scored.silence((scored.scores - means) / (means + epsilon)))


@register_adv_est("grpo_passk", reads=(), reward_unit="row")
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Give the best sample of a prompt its lead over the second best, the others 0.

    The objective is the expected maximum of a group's scores (pass@k for rewards of 0 and 1, k the
    size of the group). Leave-one-out, A_i = max of all - max without i: 0 except for the best. It
    is divided by std + epsilon of the group unless `norm_adv_by_std_in_grpo: false`. If two samples
    share the best score, the group trains nothing. Arguments and returns are those of `grpo`.

    Source: Tang et al. 2025 (arXiv 2503.19595), the leave-one-out estimate of the k-sample
    objective.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(lead_over_second(scored, epsilon if norm_adv_by_std_in_grpo else None))


def lead_over_second(scored: GroupScores, epsilon: float | None) -> torch.Tensor:
    """Return `[B]`: the lead of a sole best row over the second best of its group, else 0.

    It is divided by the group's std + epsilon, unless `epsilon` is None.
    """
    groups = scored.groups
    is_best = groups.counted & (scored.scores == groups.max(scored.scores)[groups.rows])
    others = replace(groups, counted=groups.counted & ~is_best)
    is_sole = is_best & (groups.sum(is_best.double()) == 1)[groups.rows]
    leads = torch.where(is_sole, scored.scores - others.max(scored.scores)[groups.rows], 0.0)
    return scored.silence(leads if epsilon is None else leads / (scored.std() + epsilon))


@register_adv_est("reinforce_plus_plus_baseline", reads=(), reward_unit="row")
@row_estimator
def compute_reinforce_plus_plus_baseline_outcome_advantage(scored: GroupScores) -> torch.Tensor:
    """Center each score in its group, then whiten over the trained tokens of the whole batch.

    A = whiten(score - mean of the group). Unlike in `grpo`, all groups have one scale. The shift of
    the whitening would give a group of equal scores, or of one, an advantage again; here it stays
    exactly 0, and its tokens count in the batch's mean and variance. Arguments and returns are
    those of `grpo`.

    Source: Hu et al. 2025 (arXiv 2501.03262), REINFORCE++-baseline.
    """
    return whitened_scores(scored)


def whitened_scores(scored: GroupScores) -> torch.Tensor:
    """Return `[B]`: score - mean of the group, whitened over the trained tokens of the batch."""
    return scored.silence(scored.whiten(relative_scores(scored, None)))
