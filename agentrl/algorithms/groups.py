"""Statistics of groups of rows, without a loop over rows. Shapes: B rows, T positions, G groups."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Groups:
    """Which group each row belongs to, and which rows its statistics see."""

    rows: torch.Tensor
    """`[B]` int64: the number of each row's group."""
    counted: torch.Tensor
    """`[B]` bool: rows that count. The others are as if they were not there."""
    num: int
    """G."""

    @classmethod
    def of(cls, index: np.ndarray | torch.Tensor, counted: torch.Tensor) -> "Groups":
        """Number the groups of `index` `[B]`, whatever stands in it."""
        plain = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        names, numbers = np.unique(plain, return_inverse=True)
        rows = torch.from_numpy(numbers.reshape(-1)).to(counted.device)
        return cls(rows, counted, len(names))

    def count(self) -> torch.Tensor:
        """`[G]` float64: rows that count."""
        return self.sum(torch.ones_like(self.rows, dtype=torch.float64))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]`: sum of `values` `[B]` over the rows that count."""
        zeros = values.new_zeros(self.num)
        return zeros.index_add(0, self.rows, torch.where(self.counted, values, 0.0))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]`: mean of `values` `[B]`; 0 for an empty group."""
        return self.sum(values) / self.count().clamp(min=1)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]`: standard deviation of `values` `[B]` (n - 1 in the denominator; 0 for n < 2)."""
        squares = (values - self.mean(values)[self.rows]).square()
        return (self.sum(squares) / (self.count() - 1).clamp(min=1)).sqrt()

    def is_constant(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]` bool: whether all that count are equal, by comparison. True for fewer than two."""
        return self._extreme(values, "amax") <= self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, which: str) -> torch.Tensor:
        worst = -torch.inf if which == "amax" else torch.inf
        start = values.new_full((self.num,), worst)
        seen = torch.where(self.counted, values, worst)
        return start.scatter_reduce(0, self.rows, seen, reduce=which)


def compute_outcome_scores(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row's rewards over its trained tokens alone (laws 7 and 8).

    The sum is rounded to the precision of the rewards: how a reward was spread over tokens must
    not make equal scores differ in their last digits.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B]` float64.
    """
    sums = torch.where(mask, rewards, 0.0).sum(dim=-1, dtype=torch.float64)
    return sums.to(rewards.dtype).double()
