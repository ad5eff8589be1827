"""Statistics of groups of rows, without a loop over rows. Shapes: B rows, T positions, G groups.

`Groups` says which rows belong together, `GroupScores` what they scored. An estimator is a formula
over `GroupScores`, one number per row, which `spread` then lays on the row's trained tokens.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from agentrl.algorithms.masked import WHITENING_EPSILON

_BLOCK_TOKENS = 2**18
"""Tokens that are widened to float64 at a time."""

AdvantagesAndReturns = tuple[torch.Tensor, torch.Tensor]
"""Both `[B, T]`, 0 on masked positions."""


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
        """Number the groups of `index` `[B]`: strings or numbers, all of one type."""
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

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]`: the largest of `values` `[B]`; minus infinity for an empty group."""
        return self._extreme(values, "amax")

    def is_constant(self, values: torch.Tensor) -> torch.Tensor:
        """`[G]` bool: whether all that count are equal, by comparison. True for fewer than two."""
        return self._extreme(values, "amax") <= self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, which: str) -> torch.Tensor:
        worst = -torch.inf if which == "amax" else torch.inf
        start = values.new_full((self.num,), worst)
        seen = torch.where(self.counted, values, worst)
        return start.scatter_reduce(0, self.rows, seen, reduce=which)


@dataclass(frozen=True, slots=True)
class GroupScores:
    """What each row scored, and with which rows it is compared."""

    scores: torch.Tensor
    """`[B]` float64."""
    groups: Groups
    mask: torch.Tensor
    """`[B, T]` bool: trained tokens."""
    dtype: torch.dtype
    """Of the rewards, and so of the advantages."""

    @classmethod
    def of(
        cls,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray | torch.Tensor,
        in_baseline: torch.Tensor | None,
    ) -> Self:
        """Read a batch. Rows in which nothing is trained do not count, whatever `in_baseline` says.

        Args:
            token_level_rewards: `[B, T]`.
            response_mask: `[B, T]`.
            index: `[B]`, the group of each row.
            in_baseline: `[B]`, rows that count; None: all.
        """
        mask = response_mask.bool()
        trained = _count_trained(mask) > 0
        counted = trained if in_baseline is None else trained & in_baseline.bool()
        scores = compute_outcome_scores(token_level_rewards, mask)
        return cls(scores, Groups.of(index, counted), mask, token_level_rewards.dtype)

    def with_scores(self, scores: torch.Tensor) -> Self:
        """The same rows with other scores, `[B]`."""
        return replace(self, scores=scores)

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]` int32: trained tokens of each row."""
        return _count_trained(self.mask)

    def num_in_group(self) -> torch.Tensor:
        """`[B]` float64: rows that count in each row's group."""
        return self.groups.count()[self.groups.rows]

    def mean(self) -> torch.Tensor:
        """`[B]`: the mean score of each row's group."""
        return self.groups.mean(self.scores)[self.groups.rows]

    def std(self) -> torch.Tensor:
        """`[B]`: the standard deviation of the scores in each row's group."""
        return self.groups.std(self.scores)[self.groups.rows]

    def is_silent(self) -> torch.Tensor:
        """`[B]` bool: rows that do not count, and rows of groups whose scores are all equal."""
        return self.groups.is_constant(self.scores)[self.groups.rows] | ~self.groups.counted

    def silence(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `[B]`, exactly 0 where a comparison says nothing."""
        return torch.where(self.is_silent(), 0.0, values)

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        """Shift and scale `values` `[B]` to mean 0, variance 1 over the batch's trained tokens.

        A row weighs as many tokens as are trained in it, as if its value stood on each of them.
        """
        weights = torch.where(self.groups.counted, self.lengths, 0).double()
        exact = torch.where(self.groups.counted, values, 0.0).double()
        centred = exact - (weights * exact).sum() / weights.sum().clamp(min=1)
        variance = (weights * centred.square()).sum() / (weights.sum() - 1).clamp(min=1)
        return centred * (variance + WHITENING_EPSILON).rsqrt()

    def spread(self, values: torch.Tensor) -> AdvantagesAndReturns:
        """Lay each row's value `[B]` on its trained tokens: advantages and returns are the same."""
        advantages = torch.where(self.mask, values[:, None].to(self.dtype), 0.0)
        return advantages, advantages


def compute_outcome_scores(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row's rewards over its trained tokens alone (rewards are on trained tokens;
    observations are invisible).

    The sum is rounded to the precision of the rewards: how a reward was spread over tokens must
    not make equal scores differ in their last digits.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B]` float64.
    """
    # By blocks of rows that stay in the cache while they are widened: a fifth of the time.
    num_rows = max(_BLOCK_TOKENS // max(rewards.shape[-1], 1), 1)
    blocks = zip(rewards.split(num_rows), mask.split(num_rows), strict=True)
    sums = [torch.where(inside, block, 0.0).double().sum(dim=-1) for block, inside in blocks]
    return torch.cat(sums).to(rewards.dtype).double()


def _count_trained(mask: torch.Tensor) -> torch.Tensor:
    # As bytes into int32: a sum of booleans, or into int64, widens the whole mask first.
    return mask.view(torch.uint8).sum(dim=-1, dtype=torch.int32)
