"""Pass@k: only the best sample of a prompt is worth something. Shapes: B rows, T positions."""

from dataclasses import replace

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.run import AlgorithmConfig


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
