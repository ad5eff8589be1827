"""Statistics of groups of rows, without a loop over rows. Shapes: B rows, T positions, G groups.

`Groups` holds the group of each row, `GroupScores` the scores. An estimator is a formula over
`GroupScores`: one number per row, which `spread` puts on the row's trained tokens.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from agentrl.algorithms.masked import WHITENING_EPSILON, count_trained, zero_masked

_BLOCK_TOKENS = 2**18
"""Tokens that are converted to float64 at a time."""

AdvantagesAndReturns = tuple[torch.Tensor, torch.Tensor]
"""Both `[B, T]`, 0 on masked positions."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each row, and the rows that its statistics count."""

    rows: torch.Tensor
    """`[B]` int64: the number of each row's group."""
    counted: torch.Tensor
    """`[B]` bool: rows that count. The others have no effect."""
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
        """Return `[G]` float64: the number of rows that count."""
        return self.sum(torch.ones_like(self.rows, dtype=torch.float64))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G]`: the sum of `values` `[B]` over the rows that count."""
        zeros = values.new_zeros(self.num)
        return zeros.index_add(0, self.rows, torch.where(self.counted, values, 0.0))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G]`: the mean of `values` `[B]`; 0 for an empty group."""
        return self.sum(values) / self.count().clamp(min=1)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G]`: the standard deviation of `values` `[B]` (n - 1 below; 0 for n < 2)."""
        squares = (values - self.mean(values)[self.rows]).square()
        return (self.sum(squares) / (self.count() - 1).clamp(min=1)).sqrt()

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G]`: the largest of `values` `[B]`; minus infinity for an empty group."""
        return self._extreme(values, "amax")

    def is_constant(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G]` bool: whether all counted values are equal. True for fewer than two."""
        return self._extreme(values, "amax") <= self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, which: str) -> torch.Tensor:
        worst = -torch.inf if which == "amax" else torch.inf
        start = values.new_full((self.num,), worst)
        counted = torch.where(self.counted, values, worst)
        return start.scatter_reduce(0, self.rows, counted, reduce=which)


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The score of each row, and the rows that it is compared with."""

    scores: torch.Tensor
    """`[B]` float64."""
    groups: Groups
    mask: torch.Tensor
    """`[B, T]` bool: trained tokens."""
    dtype: torch.dtype
    """The dtype of the rewards, and so of the advantages."""

    @classmethod
    def of(
        cls,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray | torch.Tensor,
        in_baseline: torch.Tensor | None,
    ) -> Self:
        """Read a batch. Rows without a trained token never count.

        Args:
            token_level_rewards: `[B, T]`.
            response_mask: `[B, T]`.
            index: `[B]`, the group of each row.
            in_baseline: `[B]`, rows that count; None: all.
        """
        mask = response_mask.bool()
        # The largest byte: `any` of booleans, and a sum, take several times as long.
        trained = mask.view(torch.uint8).amax(dim=-1) > 0 if mask.shape[-1] else mask.any(dim=-1)
        counted = trained if in_baseline is None else trained & in_baseline.bool()
        scores = compute_outcome_scores(token_level_rewards, mask)
        return cls(scores, Groups.of(index, counted), mask, token_level_rewards.dtype)

    def with_scores(self, scores: torch.Tensor) -> Self:
        """Return the same rows with other scores, `[B]`."""
        return replace(self, scores=scores)

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]` int32: trained tokens of each row."""
        return count_trained(self.mask)

    def num_in_group(self) -> torch.Tensor:
        """Return `[B]` float64: the number of rows that count in each row's group."""
        return self.groups.count()[self.groups.rows]

    def mean(self) -> torch.Tensor:
        """Return `[B]`: the mean score of each row's group."""
        return self.groups.mean(self.scores)[self.groups.rows]

    def std(self) -> torch.Tensor:
        """Return `[B]`: the standard deviation of the scores in each row's group."""
        return self.groups.std(self.scores)[self.groups.rows]

    def is_silent(self) -> torch.Tensor:
        """Return `[B]` bool: rows that do not count, or all of their group scored the same.

        These rows train nothing (invariant: equal rewards train nothing).
        """
        return self.groups.is_constant(self.scores)[self.groups.rows] | ~self.groups.counted

    def silence(self, values: torch.Tensor) -> torch.Tensor:
        """Set `values` `[B]` to exactly 0 on the rows of `is_silent`."""
        return torch.where(self.is_silent(), 0.0, values)

    def whiten(self, values: torch.Tensor) -> torch.Tensor:
        """Shift and scale `values` `[B]` to mean 0, variance 1 over the batch's trained tokens.

        The weight of a row is the number of its trained tokens, as if each of them had its value.
        """
        weights = torch.where(self.groups.counted, self.lengths, 0).double()
        exact = torch.where(self.groups.counted, values, 0.0).double()
        centered = exact - (weights * exact).sum() / weights.sum().clamp(min=1)
        variance = (weights * centered.square()).sum() / (weights.sum() - 1).clamp(min=1)
        return centered * (variance + WHITENING_EPSILON).rsqrt()

    def spread(self, values: torch.Tensor) -> AdvantagesAndReturns:
        """Put each row's value `[B]` on its trained tokens; advantages and returns are the same."""
        advantages = zero_masked(values[:, None].to(self.dtype), self.mask)
        return advantages, advantages


def compute_outcome_scores(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row's rewards over its trained tokens alone.

    The sum is rounded to the precision of the rewards. Otherwise equal scores could differ in their
    last digits if their rewards were spread over tokens in different ways.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B]` float64.
    """
    # Blocks of rows stay in the CPU cache while they are converted: a fifth of the time.
    num_rows = max(_BLOCK_TOKENS // max(rewards.shape[-1], 1), 1)
    blocks = zip(rewards.split(num_rows), mask.split(num_rows), strict=True)
    sums = [zero_masked(block, inside).double().sum(dim=-1) for block, inside in blocks]
    return torch.cat(sums).to(rewards.dtype).double()
