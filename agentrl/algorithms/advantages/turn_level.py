"""The turns of a batch, for estimators that give each turn its own credit.

Shapes: B rows, T response positions, U trained turns of the batch, K turns of the row that has
most. A turn is a run of a row's trained tokens with the same `turn_ids`: tools' and users' turns
have ids of their own and no trained token, so they are none. Values of turns lie in a flat `[U]`,
row by row; `to_rows` lays them side by side.
"""

from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.advantages.group_relative import centre, leave_one_out, normalise
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.token_level import compute_gae
from agentrl.algorithms.masked import TrainedTokens, compute_discounted_sums, masked_whiten
from agentrl.config.schema.run import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Turns:
    """Which trained tokens make up which turn, and which turns which row; all int64."""

    tokens: TrainedTokens
    starts: torch.Tensor
    """`[U]`: the first trained token of each turn, in the order of `TrainedTokens.take`."""
    sizes: torch.Tensor
    """`[U]`: trained tokens of each turn."""
    rows: torch.Tensor
    """`[U]`: the row of each turn."""
    order: torch.Tensor
    """`[U]`: how many trained turns its row has before it."""
    lengths: torch.Tensor
    """`[B]`: trained turns of each row."""

    @classmethod
    def of(cls, response_mask: torch.Tensor, turn_ids: torch.Tensor) -> "Turns":
        """Find the turns of a batch; both arguments `[B, T]`."""
        tokens = TrainedTokens.of(response_mask)
        starts = _find_starts(tokens, turn_ids)
        end = starts.new_tensor([len(tokens.sources)])
        rows = tokens.sources[starts] // max(tokens.shape[1], 1)
        lengths = torch.bincount(rows, minlength=tokens.shape[0])
        order = torch.arange(len(rows), device=rows.device) - _starts_of_rows(lengths)[rows]
        return cls(tokens, starts, starts.diff(append=end), rows, order, lengths)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """`[U]`: what `values` `[B, T]` hold on each turn's first trained token."""
        return self.tokens.take(values)[self.starts]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[U]` float64: sum of `values` `[B, T]` over each turn, in their own precision.

        Rounded, so that how a reward was spread over a turn's tokens makes no difference.
        """
        taken = self.tokens.take(values).double()
        # Unsafe: without a check that the sizes add up, which fails on a batch without any.
        sums = torch.segment_reduce(taken, "sum", lengths=self.sizes, unsafe=True)
        return sums.to(values.dtype).double()

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`[B, K]`: the values `[U]` of each row's turns in order; 0 behind its last."""
        width = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        rows = values.new_zeros(len(self.lengths), width)
        return rows.index_put((self.rows, self.order), values)

    def from_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`[U]`: what `to_rows` laid out as `[B, K]`."""
        return values[self.rows, self.order]

    def spread(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[B, T]`: each turn's value `[U]` on all of its trained tokens; 0 on masked positions."""
        return self.tokens.place(values.to(dtype).repeat_interleave(self.sizes))

    def returns_to_go(self, token_level_rewards: torch.Tensor, gamma: float) -> torch.Tensor:
        """`[U]` float64: each turn's rewards and those of later turns, discounted by turn.

        Args:
            token_level_rewards: `[B, T]`.
            gamma: Discount per turn.
        """
        sums = compute_discounted_sums(self.to_rows(self.sum(token_level_rewards)), gamma)
        return self.from_rows(sums).to(token_level_rewards.dtype).double()


def _find_starts(tokens: TrainedTokens, turn_ids: torch.Tensor) -> torch.Tensor:
    """`[U]`: the trained tokens that have another turn, or another row, than the one before."""
    ids = tokens.take(turn_ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = ids[1:] != ids[:-1]
    begins[_starts_of_rows(tokens.lengths)[tokens.lengths > 0]] = True
    return begins.nonzero().squeeze(dim=1)


def _starts_of_rows(lengths: torch.Tensor) -> torch.Tensor:
    """`[B]`: how much lies before each row where rows lie one behind the other."""
    return lengths.cumsum(dim=0) - lengths


def score_turns(values: torch.Tensor, numbers: torch.Tensor, counted: torch.Tensor) -> GroupScores:
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
    exactly 0: that is what law 9 means here. With gamma below 1, or rewards on the way, A_step may
    still tell samples apart that scored the same.

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
    A group whose returns-to-go are all equal gives exactly 0. That is what law 9 means here: with
    gamma below 1, or rewards on the way, the turns of samples that scored the same do differ.

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
