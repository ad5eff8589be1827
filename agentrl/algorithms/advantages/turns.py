"""The turns of a batch, for estimators that give each turn its own credit.

Shapes: B rows, T response positions, U trained turns of the batch, K turns of the row that has
most. A turn is a run of a row's trained tokens with the same `turn_ids`: tools' and users' turns
have ids of their own and no trained token, so they are none. Values of turns lie in a flat `[U]`,
row by row; `to_rows` lays them side by side.
"""

from dataclasses import dataclass

import torch

from agentrl.algorithms.advantages.discounting import compute_discounted_sums
from agentrl.algorithms.advantages.groups import Groups, GroupScores
from agentrl.algorithms.advantages.trained_tokens import TrainedTokens


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
