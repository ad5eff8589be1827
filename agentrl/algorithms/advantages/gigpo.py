"""Groups within groups: steps that began in the same state.

Shapes: B rows, T response positions, U trained turns.
"""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.grpo import centre, normalise
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.turns import Turns, score_turns
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est(
    "gigpo", reads=("gamma", "step_advantage_w", "norm_adv_by_std_in_grpo"), reward_unit="turn"
)
def compute_gigpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    state_ids: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    config: AlgorithmConfig,
    epsilon: float = 1e-6,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Compare a sample with its group, and each of its steps with those from the same state.

    A[k] = A_episode + w * A_step[k]. A_episode is the advantage of `grpo`. For A_step, the
    turns of a group that began in the same state are compared by G[k] = r[k] + gamma * G[k + 1]:
    centred, and divided by (std + epsilon) under `norm_adv_by_std_in_grpo`. A state that was met
    once, or from which all returns-to-go are equal, adds exactly 0, and equal scores make A_episode
    exactly 0: that is what "equal rewards train nothing" means here. With gamma below 1, or rewards
    on the way, A_step may still tell samples apart that scored the same.

    Source: Feng et al. 2025 (arXiv 2505.10978), equations 3 and 5 to 8.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        turn_ids: `[B, T]` int64, the turn that a token belongs to.
        state_ids: `[B, T]` int64, the same number on turns that began in the same state; negative
            where the state is not known.
        index: `[B]`, the group of each row: states of different groups are never the same.
        config: Of which `gamma` (per turn), `step_advantage_w` (w) and `norm_adv_by_std_in_grpo`
            are read.
        epsilon: Added to the standard deviations.
        in_baseline: `[B]` bool, rows that the statistics count; the others, and rows in which
            nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 on masked positions.
    """
    turns = Turns.of(response_mask, turn_ids)
    episodes = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    returns = turns.returns_to_go(token_level_rewards, config.gamma)
    steps = _from_same_state(turns, turns.first(state_ids), returns, episodes.groups)
    whole, part = (
        normalise(scored, epsilon) if config.norm_adv_by_std_in_grpo else centre(scored)
        for scored in (episodes, steps)
    )
    joint = whole[turns.rows] + config.step_advantage_w * part
    advantages = turns.spread(joint, token_level_rewards.dtype)
    return advantages, advantages


def _from_same_state(
    turns: Turns, states: torch.Tensor, returns: torch.Tensor, episodes: Groups
) -> GroupScores:
    """Group turns, `[U]`, by their group of rows and the state in which they began."""
    pairs = torch.stack([episodes.rows[turns.rows], states])
    numbers = torch.unique(pairs, dim=1, return_inverse=True)[1]
    return score_turns(returns, numbers, episodes.counted[turns.rows] & (states >= 0))
