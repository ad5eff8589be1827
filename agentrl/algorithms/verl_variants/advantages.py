"""The group estimators with the reference's statistics, by name: `<estimator>_verl`.

For comparisons with runs of verl 0.9.1. They break the invariants that it breaks: rewards on masked
positions are summed, a row in which nothing is trained is in its group's mean, a group
of one trains on its raw score, and equal float32 scores may differ from their mean in the last
digits, which division by their standard deviation makes large. A row that `in_baseline` leaves
out is left out here too: the reference has no such rows.

Arguments and returns are those of the estimator without the suffix. Shapes: B rows, T positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from agentrl.algorithms.advantages.gdpo import combine_rewards, read_rewards
from agentrl.algorithms.advantages.group_relative import (
    centre,
    lead_over_second,
    leave_one_out,
    length_weighted_mean,
    normalise,
    scale_by_scored_rows,
)
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig

Index = np.ndarray | torch.Tensor


@dataclass(frozen=True, slots=True)
class ReferenceScores(GroupScores):
    """Scores summed over all positions, in the precision of the rewards; every row counts."""

    @classmethod
    def of(
        cls,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Index,
        in_baseline: torch.Tensor | None,
    ) -> Self:
        """Read a batch, as the reference does."""
        scores = token_level_rewards.sum(dim=-1)
        every_row = torch.ones_like(scores, dtype=torch.bool)
        counted = every_row if in_baseline is None else in_baseline.bool()
        groups = Groups.of(index, counted)
        return cls(scores, groups, response_mask.bool(), token_level_rewards.dtype)

    def mean(self) -> torch.Tensor:
        """`[B]`: the mean score of each row's group, 0 for a group of one."""
        means = self.groups.mean(self.scores)[self.groups.rows]
        return torch.where(self.num_in_group() == 1, 0.0, means)

    def std(self) -> torch.Tensor:
        """`[B]`: the standard deviation in each row's group, 1 for a group of one."""
        stds = self.groups.std(self.scores)[self.groups.rows]
        return torch.where(self.num_in_group() == 1, 1.0, stds)

    def is_silent(self) -> torch.Tensor:
        """`[B]` bool: rows that do not count, and no others."""
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
    """Do as `grpo`, with the reference's statistics. A group of one trains on its raw score."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(normalise(scored, epsilon) if norm_adv_by_std_in_grpo else centre(scored))


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
    """Do as `grpo_passk`, with the reference's statistics.

    Raises:
        ValueError: for a group of one.
    """
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    if (scored.groups.count() == 1).any():
        raise ValueError("pass@k compares the best of a group with the second: there is a lone row")
    leads = lead_over_second(scored)
    return scored.spread(leads / (scored.std() + epsilon) if norm_adv_by_std_in_grpo else leads)


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
    """Do as `gdpo`, with the reference's statistics: the batch's mean also moves equal groups."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    rewards, weights = read_rewards(scored, config, non_tensor_batch)
    return scored.spread(
        combine_rewards(scored, rewards, weights, epsilon if norm_adv_by_std_in_grpo else None)
    )


@register_adv_est("reinforce_plus_plus_baseline_verl", reward_unit="row")
def compute_reinforce_plus_plus_baseline_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `reinforce_plus_plus_baseline`: the batch's mean also moves equal groups."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scored.silence(scored.whiten(centre(scored))))


@register_adv_est("rloo_verl", reward_unit="row")
def compute_rloo_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `rloo`, with the reference's statistics. A group of one trains on its raw score."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    is_alone = scored.groups.counted & (scored.num_in_group() == 1)
    return scored.spread(torch.where(is_alone, scored.scores, leave_one_out(scored)))


@register_adv_est("rloo_vectorized_verl", reward_unit="row")
def compute_rloo_vectorized_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `rloo_verl`, but a group of one trains on nothing."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    is_alone = scored.num_in_group() == 1
    return scored.spread(torch.where(is_alone, 0.0, leave_one_out(scored)))


@register_adv_est("opo_verl", reward_unit="row")
def compute_opo_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `opo`, with the reference's statistics. A group of one trains on its raw score."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    is_alone = scored.num_in_group() == 1
    baseline = torch.where(is_alone, 0.0, length_weighted_mean(scored))
    return scored.spread(scored.silence(scored.scores - baseline))


@register_adv_est("gpg_verl", reward_unit="row")
def compute_gpg_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    f_norm: float = 1.0,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Do as `gpg`, with the reference's statistics. A group of one trains on its raw score."""
    scored = ReferenceScores.of(token_level_rewards, response_mask, index, in_baseline)
    return scored.spread(scale_by_scored_rows(scored, f_norm))
