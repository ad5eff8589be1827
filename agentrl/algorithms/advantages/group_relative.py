"""GRPO and Dr.GRPO. Shapes: B rows, T response positions."""

from dataclasses import replace

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig
from agentrl.errors import ConfigError


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
    """Compare each sample's score with the other samples of its prompt.

    A = (score - mean) / (std + epsilon) on every trained token; with
    `norm_adv_by_std_in_grpo: false`, A = score - mean. A group whose scores are all equal, or in
    which one row counts, trains on nothing: its advantages are exactly 0 (law 9).

    Source: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (2503.20783), for
    Dr.GRPO: `norm_adv_by_std_in_grpo: false` with `loss_agg_mode: seq-mean-token-sum-norm`.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        index: `[B]`, the group of each row.
        epsilon: Added to the standard deviation. (Other estimators take it, and `config`, for the
            convention where they do not read them.)
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        config: Taken for the convention of estimators; not read.
        in_baseline: `[B]` bool, rows that the group's statistics count; the others, and rows in
            which nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 on masked positions.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(normalise(scored, epsilon) if norm_adv_by_std_in_grpo else centre(scored))


# One function under two names: a second one, vectorised, is what other systems need.
register_adv_est("grpo_vectorized", reads=(), reward_unit="row")(compute_grpo_outcome_advantage)


def centre(scored: GroupScores) -> torch.Tensor:
    """`[B]`: score - mean of the group."""
    return scored.silence(scored.scores - scored.mean())


def normalise(scored: GroupScores, epsilon: float) -> torch.Tensor:
    """`[B]`: (score - mean) / (std + epsilon) of the group."""
    return scored.silence((scored.scores - scored.mean()) / (scored.std() + epsilon))


@register_adv_est("rloo", reads=(), reward_unit="row")
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Take off each score the mean score of the *other* samples of its prompt.

    A_i = score_i - mean of score_j, j != i, = (score_i - mean) n / (n - 1) in a group of n. The
    baseline does not depend on the sample, so the policy gradient is unbiased. A group of equal
    scores or of one gives exactly 0. Arguments and returns are those of `grpo`.

    Source: Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3; Kool et al. 2019.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(leave_one_out(scored))


register_adv_est("rloo_vectorized", reads=(), reward_unit="row")(compute_rloo_outcome_advantage)


def leave_one_out(scored: GroupScores) -> torch.Tensor:
    """`[B]`: score - mean score of the group's other rows."""
    num = scored.num_in_group()
    return scored.silence((scored.scores - scored.mean()) * num / (num - 1).clamp(min=1))


@register_adv_est("opo", reads=(), reward_unit="row")
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Take off each score its group's mean score, weighted by the number of trained tokens.

    A_i = score_i - (sum of length_j score_j) / (sum of length_j) over the group. This is the
    baseline of least variance where every token's gradient has the same norm and those of
    different tokens are orthogonal. A group of equal scores or of one gives exactly 0. Arguments
    and returns are those of `grpo`.

    Source: Hao et al. 2025 (arXiv 2505.23585), section 2 (the optimal reward baseline).
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scored.silence(scored.scores - length_weighted_mean(scored)))


def length_weighted_mean(scored: GroupScores) -> torch.Tensor:
    """`[B]`: the mean over the trained tokens of each row's group of the score of their row."""
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
    """Centre each score in its group, and scale up for the rows of the batch that scored nothing.

    A = alpha (score - mean) / f_norm with alpha = rows / rows whose score is not 0, over the rows
    of the whole batch that count. A group of equal scores or of one gives exactly 0. Arguments
    (but `f_norm`, which all advantages are divided by) and returns are those of `grpo`.

    Source: Chu et al. 2025 (arXiv 2504.02546), section 2.2, with the alpha of verl 0.9.1. The
    paper's (equation 7) is groups / groups *whose scores differ*: the share of groups that give a
    gradient. This one depends on where the rewards' zero lies, and grows as scores of 0 do. A KL in
    the reward leaves hardly any score at exactly 0, and alpha near 1.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scale_by_scored_rows(scored, f_norm))


def scale_by_scored_rows(scored: GroupScores, f_norm: float) -> torch.Tensor:
    """`[B]`: alpha (score - mean) / f_norm."""
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
    """Centre each score in its group and divide by the group's mean score.

    A = (score - mean) / (mean + epsilon). For rewards of 0 and 1 and n samples its expectation is
    the gradient of log P(success), developed in powers of P(failure) and cut after n - 1 terms;
    the first term is P(success), which `rloo` and Dr.GRPO follow. A prompt that is solved once in
    n weighs n times. A group of equal scores or of one gives exactly 0. Arguments and returns are
    those of `grpo`.

    Source: Tajwar, Zeng et al. 2026 (arXiv 2602.02710), algorithm 1, without its factor 1 / n,
    which is the aggregation's.

    Raises:
        ConfigError: for a negative score. The mean of such a group may be 0 or below, where
            dividing by it blows the advantage up or turns its sign.
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
    """Credit the best sample of a prompt with its lead over the second; the others with nothing.

    The objective is the expected maximum of a group's scores (pass@k for rewards of 0 and 1, k the
    size of the group). Leave-one-out, A_i = max of all - max without i: 0 but for the best. It is
    divided by std + epsilon of the group unless `norm_adv_by_std_in_grpo: false`. Where two share
    the first place, and in a group of one, nothing is trained. Arguments and returns are those of
    `grpo`.

    Source: Tang et al. 2025 (arXiv 2503.19595), the leave-one-out estimate of the k-sample
    objective.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    leads = lead_over_second(scored)
    return scored.spread(
        scored.silence(leads / (scored.std() + epsilon)) if norm_adv_by_std_in_grpo else leads
    )


def lead_over_second(scored: GroupScores) -> torch.Tensor:
    """`[B]`: the score less the second best of the group; 0 for all but a sole best."""
    groups = scored.groups
    is_best = groups.counted & (scored.scores == groups.max(scored.scores)[groups.rows])
    others = replace(groups, counted=groups.counted & ~is_best)
    is_sole = is_best & (groups.sum(is_best.double()) == 1)[groups.rows]
    leads = scored.scores - others.max(scored.scores)[groups.rows]
    return scored.silence(torch.where(is_sole, leads, 0.0))


@register_adv_est("reinforce_plus_plus_baseline", reads=(), reward_unit="row")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    config: AlgorithmConfig | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Centre each score in its group, then whiten over the trained tokens of the whole batch.

    A = whiten(score - mean of the group). Groups share one scale, unlike in `grpo`. The shift of
    whitening would give a group of equal scores, or of one, an advantage again; here it stays
    exactly 0 (law 9), while its tokens count in the batch's mean and variance. Arguments and
    returns are those of `grpo`.

    Source: Hu et al. 2025 (arXiv 2501.03262), REINFORCE++-baseline.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scored.silence(scored.whiten(centre(scored))))
