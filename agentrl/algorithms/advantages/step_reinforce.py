"""REINFORCE by step of an episode. Shapes: B rows, T response positions, U trained turns."""

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.grpo import centre, normalise
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.turns import Turns, score_turns


@register_adv_est("step_reinforce", reward_unit="turn")
def compute_step_reinforce_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Compare each turn's discounted return-to-go with all turns of its group's samples.

    A[k] = (G[k] - mean) / (std + epsilon), with G[k] = r[k] + gamma * G[k + 1]; mean and standard
    deviation are over every turn of every sample of the prompt. One baseline serves all turns, so
    nothing is assumed about which turns compare; a sample with many turns weighs more in it.
    A group whose returns-to-go are all equal gives exactly 0. That is what "equal rewards train
    nothing" means here: with gamma below 1, or rewards on the way, the turns of samples that scored
    the same do differ.

    Source: `step_reinforce` of ROLL (arXiv 2506.06122), its agentic pipeline, with the rewards
    normalised by group of trajectories.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        turn_ids: `[B, T]` int64, the turn that a token belongs to.
        index: `[B]`, the group of each row.
        gamma: Discount per turn.
        epsilon: Added to the standard deviation.
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        in_baseline: `[B]` bool, rows that the statistics count; the others, and rows in which
            nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 on masked positions.
    """
    turns, dtype = Turns.of(response_mask, turn_ids), token_level_rewards.dtype
    groups = GroupScores.of(token_level_rewards, response_mask, index, in_baseline).groups
    returns = turns.returns_to_go(token_level_rewards, gamma)
    scored = score_turns(returns, groups.rows[turns.rows], groups.counted[turns.rows])
    relative = normalise(scored, epsilon) if norm_adv_by_std_in_grpo else centre(scored)
    return turns.spread(relative, dtype), turns.spread(returns, dtype)
