"""Estimators that give each turn its own credit.

Shapes: B rows, T response positions, U trained turns of the batch, K turns of the row that has
most. A turn is a run of a row's trained tokens with the same `turn_ids`. Turns of tools and users
have ids of their own and no trained token, so they are not counted. Values of turns are in a flat
`[U]`, row by row; `to_rows` makes one line per row.

Rewards are on tokens (`token_level_rewards`): rewards of turns, tools and interactions have the
weight that `reward.weights` gives them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.advantages.group_relative import leave_one_out, relative_scores
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.token_level import compute_gae
from agentrl.algorithms.masked import TrainedTokenIndex, compute_discounted_sums, whiten
from agentrl.config.schema.training import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TrainedTurns:
    """The trained tokens of each turn, and the row of each turn; all int64."""

    tokens: TrainedTokenIndex
    starts: torch.Tensor
    """`[U]`: the first trained token of each turn, as an index into `TrainedTokenIndex.take`."""
    sizes: torch.Tensor
    """`[U]`: trained tokens of each turn."""
    rows: torch.Tensor
    """`[U]`: the row of each turn."""
    order: torch.Tensor
    """`[U]`: number of trained turns that its row has before it."""
    lengths: torch.Tensor
    """`[B]`: trained turns of each row."""

    @classmethod
    def of(cls, response_mask: torch.Tensor, turn_ids: torch.Tensor) -> "TrainedTurns":
        """Find the turns of a batch; both arguments `[B, T]`."""
        tokens = TrainedTokenIndex.of(response_mask)
        # A turn starts at a trained token with another turn or row than the one before.
        ids = tokens.take(turn_ids)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[1:] = ids[1:] != ids[:-1]
        begins[_starts_of_rows(tokens.lengths)[tokens.lengths > 0]] = True
        starts = begins.nonzero().squeeze(dim=1)
        end = starts.new_tensor([len(ids)])
        rows = torch.searchsorted(tokens.lengths.cumsum(dim=0), starts, right=True)
        lengths = torch.bincount(rows, minlength=len(tokens.lengths))
        order = torch.arange(len(rows), device=rows.device) - _starts_of_rows(lengths)[rows]
        return cls(tokens, starts, starts.diff(append=end), rows, order, lengths)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[U]`: `values` `[B, T]` at each turn's first trained token."""
        return self.tokens.take(values)[self.starts]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[U]` float64: the sum of `values` `[B, T]` over each turn, in their precision.

        The sum is rounded, so that it does not depend on how a reward was spread over tokens.
        """
        taken = self.tokens.take(values).double()
        # `unsafe` omits the check that the sizes add up, which fails on a batch without turns.
        sums = torch.segment_reduce(taken, "sum", lengths=self.sizes, unsafe=True)
        return sums.to(values.dtype).double()

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[B, K]`: the values `[U]` of each row's turns in order, then zeros."""
        width = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        rows = values.new_zeros(len(self.lengths), width)
        return rows.index_put((self.rows, self.order), values)

    def from_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[U]`: the inverse of `to_rows`, from `[B, K]`."""
        return values[self.rows, self.order]

    def spread(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `[B, T]`: each turn's value `[U]` on all its trained tokens; 0 where masked."""
        return self.tokens.put(values.to(dtype).repeat_interleave(self.sizes))

    def returns_to_go(self, token_level_rewards: torch.Tensor, gamma: float) -> torch.Tensor:
        """Return `[U]` float64: each turn's rewards and those of later turns, discounted by turn.

        Args:
            token_level_rewards: `[B, T]`.
            gamma: Discount per turn.
        """
        sums = compute_discounted_sums(self.to_rows(self.sum(token_level_rewards)), gamma)
        return self.from_rows(sums).to(token_level_rewards.dtype).double()


def _starts_of_rows(lengths: torch.Tensor) -> torch.Tensor:
    """Return `[B]`: the offset of each row if rows are concatenated."""
    return lengths.cumsum(dim=0) - lengths


def _score_turns(values: torch.Tensor, numbers: torch.Tensor, counted: torch.Tensor) -> GroupScores:
    """Compare turns with each other as if each were a row of one token.

    Args:
        values: `[U]` float64.
        numbers: `[U]` int64, the group of each turn, counted from 0.
        counted: `[U]` bool, turns that count.
    """
    num_groups = int(numbers.max()) + 1 if len(numbers) else 0
    groups = Groups(numbers, counted, num_groups)
    return GroupScores(values, groups, counted[:, None], values.dtype)


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
    The critic learns A[k] + V[k] on every trained token of the turn. If each turn has one token,
    this is `gae`.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16, over turns as in Li et
    al. 2025 (Turn-PPO, arXiv 2512.17008).

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        values: `[B, T]`, the critic's value of the state before each token.
        response_mask: `[B, T]`, nonzero at trained tokens.
        turn_ids: `[B, T]` int64, the turn of each token.
        gamma: Discount per turn.
        lam: From 0 (one turn, trusts the critic) to 1 (the whole return).

    Returns:
        Advantages and returns, `[B, T]`; 0 at masked positions.
    """
    turns, dtype = TrainedTurns.of(response_mask, turn_ids), token_level_rewards.dtype
    known = turns.to_rows(turns.first(values).double())
    rewards = turns.to_rows(turns.sum(token_level_rewards))
    advantages = compute_gae(rewards, known, gamma, lam)
    by_token = turns.from_rows(advantages).to(dtype).repeat_interleave(turns.sizes)
    returns = turns.spread(turns.from_rows(advantages + known), dtype)
    return turns.tokens.put(whiten(by_token)), returns


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

    A_i[k] = G_i[k] - mean of G_j[k], j != i, where G[k] = r[k] + gamma * G[k + 1] is the sum of the
    rewards of turn k and later turns. A sample that stopped before turn k stays in the mean, with
    the return-to-go of its last turn. So the baseline at every turn is made of all other samples.
    It does not depend on what sample i did at turn k or later, not even on its number of turns, and
    the policy gradient is unbiased. (A mean over the samples that reached turn k, including i,
    shrinks each turn by another factor: the number of samples that reached it.)

    If the whole reward is on the last turn and gamma is 1, this is `rloo`. A turn at which the
    whole group has the same return-to-go, and a group of one, give exactly 0. With gamma below 1,
    samples with equal scores and different numbers of turns differ: an equal score is worth less to
    an early turn of a sample that takes more turns.

    Source: none known for stopped samples; leave-one-out baselines are those of Kool et al. 2019
    and Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        turn_ids: `[B, T]` int64, the turn of each token.
        index: `[B]`, the group of each row.
        gamma: Discount per turn.
        in_baseline: `[B]` bool, rows that the group's statistics count. The others, and rows
            without a trained token, have no effect on them. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 at masked positions.
    """
    turns, dtype = TrainedTurns.of(response_mask, turn_ids), token_level_rewards.dtype
    groups = GroupScores.of(token_level_rewards, response_mask, index, in_baseline).groups
    returns = turns.returns_to_go(token_level_rewards, gamma)
    by_turn = turns.to_rows(returns)
    num_turns = by_turn.shape[1]
    turn_index = torch.arange(num_turns, device=by_turn.device)
    # Repeat each row's last value to the end of the row.
    last = (turns.lengths - 1).clamp(min=0)[:, None]
    by_turn = by_turn.gather(1, torch.minimum(turn_index, last))
    numbers = (groups.rows[:, None] * num_turns + turn_index).flatten()
    counted = groups.counted.repeat_interleave(num_turns)
    relative = leave_one_out(_score_turns(by_turn.flatten(), numbers, counted))
    advantages = turns.from_rows(relative.view_as(by_turn))
    return turns.spread(advantages, dtype), turns.spread(returns, dtype)


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
    centered, and divided by (std + epsilon) under `norm_adv_by_std_in_grpo`. A state that occurs
    once, or from which all returns-to-go are equal, adds exactly 0, and equal scores make A_episode
    exactly 0. With gamma below 1, or rewards on earlier turns, A_step may still differ between
    samples with equal scores.

    Source: Feng et al. 2025 (arXiv 2505.10978), equations 3 and 5 to 8.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        turn_ids: `[B, T]` int64, the turn of each token.
        state_ids: `[B, T]` int64, the same number on turns that began in the same state; negative
            if the state is not known.
        index: `[B]`, the group of each row: states of different groups are never the same.
        config: Its `gamma` (per turn), `step_advantage_w` (w) and `norm_adv_by_std_in_grpo` are
            read.
        epsilon: Added to the standard deviations.
        in_baseline: `[B]` bool, rows that the statistics count. The others, and rows without a
            trained token, have no effect on them. None: all rows.

    Returns:
        Advantages and returns, `[B, T]`, the same tensor; 0 at masked positions.
    """
    turns = TrainedTurns.of(response_mask, turn_ids)
    episodes = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    returns = turns.returns_to_go(token_level_rewards, config.gamma)
    states, rows = turns.first(state_ids), episodes.groups.rows[turns.rows]
    numbers = torch.unique(torch.stack([rows, states]), dim=1, return_inverse=True)[1]
    steps = _score_turns(returns, numbers, episodes.groups.counted[turns.rows] & (states >= 0))
    divisor = epsilon if config.norm_adv_by_std_in_grpo else None
    whole, part = relative_scores(episodes, divisor), relative_scores(steps, divisor)
    joint = whole[turns.rows] + config.step_advantage_w * part
    advantages = turns.spread(joint, token_level_rewards.dtype)
    return advantages, advantages


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
    deviation are over every turn of every sample of the prompt. All turns have one baseline, so
    no assumption is made about which turns compare; a sample with many turns has more weight in it.
    A group with equal returns-to-go gives exactly 0. With gamma below 1, or rewards on
    earlier turns, the turns of samples with equal scores differ.

    Source: `step_reinforce` of ROLL (arXiv 2506.06122), its agentic pipeline, with the rewards
    normalized by group of trajectories.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        turn_ids: `[B, T]` int64, the turn of each token.
        index: `[B]`, the group of each row.
        gamma: Discount per turn.
        epsilon: Added to the standard deviation.
        norm_adv_by_std_in_grpo: Whether to divide by the standard deviation.
        in_baseline: `[B]` bool, rows that the statistics count. The others, and rows without a
            trained token, have no effect on them. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 at masked positions.
    """
    turns, dtype = TrainedTurns.of(response_mask, turn_ids), token_level_rewards.dtype
    groups = GroupScores.of(token_level_rewards, response_mask, index, in_baseline).groups
    returns = turns.returns_to_go(token_level_rewards, gamma)
    scored = _score_turns(returns, groups.rows[turns.rows], groups.counted[turns.rows])
    relative = relative_scores(scored, epsilon if norm_adv_by_std_in_grpo else None)
    return turns.spread(relative, dtype), turns.spread(returns, dtype)
