"""Credit by turn: what a turn and the turns after it earned, and nothing from before it.

Shapes: B rows, T response positions, U trained turns, K turns of the longest row. Rewards stand on
tokens (`token_level_rewards`), so those of turns, tools and interactions weigh in where
`reward.weights` lets them.
"""

import numpy as np
import torch

from agentrl.algorithms.advantages.gae import compute_gae
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.rloo import leave_one_out
from agentrl.algorithms.advantages.turns import Turns, score_turns
from agentrl.algorithms.masked import masked_whiten


@register_adv_est("turn_gae", reward_unit="turn")
def compute_turn_gae_advantage(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    gamma: float,
    lam: float,
) -> AdvantagesAndReturns:
    """Estimate advantages as `gae` does, with a turn as the unit of time instead of a token.

    delta[k] = r[k] + gamma * V[k + 1] - V[k]; A[k] = delta[k] + gamma * lam * A[k + 1]. V[k] is the
    critic's value before the first trained token of turn k, r[k] the sum of the turn's rewards. All
    trained tokens of a turn have its advantage; these are whitened over the batch's trained tokens.
    The critic learns A[k] + V[k] on every trained token of the turn. Where each turn has one token
    this is `gae`.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16, over turns, as Li et
    al. 2025 (Turn-PPO, arXiv 2512.17008) take them.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        values: `[B, T]`, the critic's value of the state before each token.
        response_mask: `[B, T]`, nonzero where a token is trained.
        turn_ids: `[B, T]` int64, the turn that a token belongs to.
        gamma: Discount per turn.
        lam: From 0 (one turn, trusts the critic) to 1 (the whole return).

    Returns:
        Advantages and returns, `[B, T]`; 0 on masked positions.
    """
    turns, dtype = Turns.of(response_mask, turn_ids), token_level_rewards.dtype
    known = turns.to_rows(turns.first(values).double())
    rewards = turns.to_rows(turns.sum(token_level_rewards))
    advantages = compute_gae(rewards, known, gamma, lam)
    by_token = turns.from_rows(advantages).to(dtype).repeat_interleave(turns.sizes)
    whitened = masked_whiten(by_token, torch.ones_like(by_token))
    returns = turns.spread(turns.from_rows(advantages + known), dtype)
    return turns.tokens.place(whitened), returns


@register_adv_est("turn_rloo", reward_unit="turn")
def compute_turn_rloo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    turn_ids: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    gamma: float = 1.0,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Compare each turn's return-to-go with that of the *other* samples at the same turn.

    A_i[k] = G_i[k] - mean of G_j[k], j != i, where G[k] = r[k] + gamma * G[k + 1] is what turn k
    and later turns earned. A sample that stopped before turn k stays in the mean, with the
    return-to-go of its last turn. So the baseline is made of the other samples alone, all of them
    at every turn. Nothing in it depends on what sample i did at turn k or later, not even on how
    many turns it took, and the policy gradient is unbiased. (A mean over the samples that reached
    turn k, oneself among them, shrinks each turn by another factor: how many got there.)

    Where the whole reward is on the last turn and gamma is 1 this is `rloo`. A turn at which all
    of the group have the same return-to-go, and a group of one, give exactly 0. That is what "equal
    rewards train nothing" means here: with gamma below 1 an equal score is worth less to an early
    turn of a sample that takes more turns, and such samples do differ.

    Source: none known for stopped samples; leave-one-out baselines are those of Kool et al. 2019
    and Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        turn_ids: `[B, T]` int64, the turn that a token belongs to.
        index: `[B]`, the group of each row.
        gamma: Discount per turn.
        in_baseline: `[B]` bool, rows that the group's statistics count; the others, and rows in
            which nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 on masked positions.
    """
    turns, dtype = Turns.of(response_mask, turn_ids), token_level_rewards.dtype
    groups = GroupScores.of(token_level_rewards, response_mask, index, in_baseline).groups
    returns = turns.returns_to_go(token_level_rewards, gamma)
    by_turn = _hold_last(turns.to_rows(returns), turns.lengths)
    num_turns = by_turn.shape[1]
    places = torch.arange(num_turns, device=by_turn.device)
    numbers = (groups.rows[:, None] * num_turns + places).flatten()
    counted = groups.counted.repeat_interleave(num_turns)
    relative = leave_one_out(score_turns(by_turn.flatten(), numbers, counted))
    advantages = turns.from_rows(relative.view_as(by_turn))
    return turns.spread(advantages, dtype), turns.spread(returns, dtype)


def _hold_last(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Go on with each row's last value behind its end, `[B, K]`."""
    places = torch.arange(values.shape[1], device=values.device)
    return values.gather(1, torch.minimum(places, (lengths - 1).clamp(min=0)[:, None]))
