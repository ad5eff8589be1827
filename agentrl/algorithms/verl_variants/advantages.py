"""Estimators with verl's statistics, by name: `<estimator>_verl`. For comparisons with verl 0.9.1.

They break invariants where verl does: rewards on masked positions are summed, a row without a
trained token is in its group's mean, a group of one trains on its raw score, and equal float32
scores may differ from their mean in the last digits, which the division by their standard deviation
makes large. A row that `in_baseline` excludes is excluded here too: verl has no such rows.

Arguments and returns are those of the estimator without the suffix. Shapes: B rows, T positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.nn.functional import pad

from agentrl.algorithms.advantages.gdpo import combine_rewards, read_rewards
from agentrl.algorithms.advantages.group_relative import (
    RowFormula,
    lead_over_second,
    leave_one_out,
    length_weighted_mean,
    relative_scores,
    scale_by_scored_rows,
    whitened_scores,
)
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.token_baseline import (
    TokenBaseline,
    packed_gradient_norms,
    squared_gradient_norms,
)
from agentrl.algorithms.advantages.token_level import compute_gae, compute_returns_to_go
from agentrl.algorithms.masked import WHITENING_EPSILON, TrainedTokenIndex
from agentrl.config.schema.training import AlgorithmConfig

Index = np.ndarray | torch.Tensor


@dataclass(frozen=True, slots=True)
class VerlScores(GroupScores):
    """Scores summed over all positions, in the precision of the rewards; every row counts."""

    @classmethod
    def of(
        cls,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Index,
        in_baseline: torch.Tensor | None,
    ) -> Self:
        """Read a batch as verl does."""
        scores = token_level_rewards.sum(dim=-1)
        every_row = torch.ones_like(scores, dtype=torch.bool)
        counted = every_row if in_baseline is None else in_baseline.bool()
        groups = Groups.of(index, counted)
        return cls(scores, groups, response_mask.bool(), token_level_rewards.dtype)

    def is_alone(self) -> torch.Tensor:
        """Return `[B]` bool: rows that are alone in their group."""
        return self.num_in_group() == 1

    def mean(self) -> torch.Tensor:
        """Return `[B]`: the mean score of each row's group, 0 for a group of one."""
        means = self.groups.mean(self.scores)[self.groups.rows]
        return torch.where(self.is_alone(), 0.0, means)

    def std(self) -> torch.Tensor:
        """Return `[B]`: the standard deviation in each row's group, 1 for a group of one."""
        stds = self.groups.std(self.scores)[self.groups.rows]
        return torch.where(self.is_alone(), 1.0, stds)

    def is_silent(self) -> torch.Tensor:
        """Return `[B]` bool: rows that do not count, and no others."""
        return ~self.groups.counted


@register_adv_est("grpo_verl", reward_unit="row")
def compute_grpo_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `grpo`, with verl's statistics. A group of one trains on its raw score."""
    scored = VerlScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(relative_scores(scored, epsilon if norm_adv_by_std_in_grpo else None))


register_adv_est("grpo_vectorized_verl", reward_unit="row")(compute_grpo_verl_advantage)


@register_adv_est("grpo_passk_verl", reward_unit="row")
def compute_grpo_passk_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `grpo_passk`, with verl's statistics.

    Raises:
        ValueError: for a group of one.
    """
    scored = VerlScores.of(token_level_rewards, response_mask, index, in_baseline)
    if (scored.groups.count() == 1).any():
        raise ValueError("pass@k compares the best of a group with the second: a group has one row")
    return scored.spread(lead_over_second(scored, epsilon if norm_adv_by_std_in_grpo else None))


@register_adv_est(
    "gdpo_verl", reads=("gdpo_reward_keys", "gdpo_reward_weights"), reward_unit="named"
)
def compute_gdpo_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    non_tensor_batch: Mapping[str, np.ndarray] | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `gdpo`, with verl's statistics: the batch's mean also moves equal groups."""
    scored = VerlScores.of(token_level_rewards, response_mask, index, in_baseline)
    rewards, weights = read_rewards(scored, config, non_tensor_batch)
    return scored.spread(
        combine_rewards(scored, rewards, weights, epsilon if norm_adv_by_std_in_grpo else None)
    )


@register_adv_est("gpg_verl", reward_unit="row")
def compute_gpg_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    f_norm: float = 1.0,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `gpg`, with verl's statistics. A group of one trains on its raw score."""
    scored = VerlScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scale_by_scored_rows(scored, f_norm))


def _register(name: str, formula: RowFormula) -> None:
    """Register a formula for the advantage of each row, `[B]`, on verl's statistics."""

    def estimator(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Index,
        in_baseline: torch.Tensor | None = None,
    ) -> AdvantagesAndReturns:
        scored = VerlScores.of(token_level_rewards, response_mask, index, in_baseline)
        return scored.spread(formula(scored))

    register_adv_est(name, reward_unit="row")(estimator)


def _zero_if_alone(scored: GroupScores, values: torch.Tensor) -> torch.Tensor:
    return torch.where(scored.num_in_group() == 1, 0.0, values)


# A group of one trains on its raw score, except in `rloo_vectorized`. In
# `reinforce_plus_plus_baseline` the batch's mean also moves equal groups.
_register("reinforce_plus_plus_baseline_verl", whitened_scores)
_register("rloo_verl", leave_one_out)
_register("rloo_vectorized_verl", lambda scored: _zero_if_alone(scored, leave_one_out(scored)))
_register(
    "opo_verl",
    lambda scored: scored.silence(
        scored.scores - _zero_if_alone(scored, length_weighted_mean(scored))
    ),
)


@register_adv_est("gae_verl")
def compute_gae_verl_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> AdvantagesAndReturns:
    """Do as `gae`, with verl's values at masked tokens.

    A masked token has the advantage of the next trained one, shifted and scaled like the others,
    and the return of that advantage and its own value. A batch without a trained token has no
    mean: its advantages are NaN, and torch warns.
    """
    mask = response_mask.bool()
    tokens = TrainedTokenIndex.of(response_mask)
    rewards = tokens.pack(token_level_rewards)
    advantages = compute_gae(rewards, tokens.pack(values), gamma, lam)
    trained_before = mask.cumsum(dim=-1) - mask.long()
    everywhere = pad(advantages, (0, 1)).gather(1, trained_before)
    kept = advantages[tokens.present]
    whitened = (everywhere - kept.mean()) * (kept.var() + WHITENING_EPSILON).rsqrt()
    return whitened, everywhere + values


@register_adv_est("remax_verl")
def compute_remax_verl_outcome_advantage(
    token_level_rewards: torch.Tensor, reward_baselines: torch.Tensor, response_mask: torch.Tensor
) -> AdvantagesAndReturns:
    """Do as `remax`, and give masked tokens the return of later tokens, without a baseline."""
    mask = response_mask.bool()
    returns = compute_returns_to_go(token_level_rewards, mask)
    return returns - torch.where(mask, reward_baselines[:, None], 0.0), returns


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""`old_log_probs`, `sum_pi_squared`, `rollout_is_weights`."""


def _compare_by_position(
    returns: torch.Tensor, columns: Columns, mask: torch.Tensor, index: Index, **settings: Any
) -> torch.Tensor:
    """Compare tokens with the same number of tokens before them, observed ones included."""
    norms = torch.where(mask, squared_gradient_norms(*columns), 0.0)
    groups = Groups.of(index, torch.ones_like(mask[:, 0]))
    return TokenBaseline(returns, norms, mask, groups).advantages(**settings)


def _compare_by_trained_token(
    returns: torch.Tensor, columns: Columns, mask: torch.Tensor, index: Index, **settings: Any
) -> torch.Tensor:
    """Compare tokens with the same number of trained tokens before them."""
    tokens = TrainedTokenIndex.of(mask)
    norms = packed_gradient_norms(tokens, *columns)
    groups = Groups.of(index, mask.any(dim=-1))
    baseline = TokenBaseline(tokens.pack(returns), norms, tokens.present, groups)
    return tokens.unpack(baseline.advantages(**settings))


def _register_token_baseline(name: str, compare: Callable[..., torch.Tensor]) -> None:
    """Register the optimal token baseline with verl's results for groups without a comparison.

    A group of one trains on its returns, equal scores on the rest that rounding and
    `handle_zero_tail` leave, and masked tokens have returns.
    """

    def estimator(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Index,
        old_log_probs: torch.Tensor,
        sum_pi_squared: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
        handle_zero_tail: bool = True,
        epsilon: float = 1e-8,
    ) -> AdvantagesAndReturns:
        mask, dtype = response_mask.bool(), token_level_rewards.dtype
        returns = compute_returns_to_go(token_level_rewards.double(), mask)
        columns = old_log_probs, sum_pi_squared, rollout_is_weights
        relative = compare(
            returns, columns, mask, index, epsilon=epsilon, handle_zero_tail=handle_zero_tail
        )
        return relative.to(dtype), returns.to(dtype)

    register_adv_est(name, by_position=compare is _compare_by_position)(estimator)


_register_token_baseline("optimal_token_baseline_verl", _compare_by_position)
_register_token_baseline("tir_optimal_token_baseline_verl", _compare_by_trained_token)
