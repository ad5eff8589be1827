"""Statistics, sums and layouts of the trained positions alone.

A value at a masked position, NaN included, has no effect. Shapes: B rows, T response positions,
M trained tokens of the batch, N trained tokens of the longest row.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

WHITENING_EPSILON = 1e-8
"""Added to a variance before it divides."""
_BLOCK = 32
"""Positions that one matrix product sums."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the values at unmasked positions."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the values at unmasked positions; 0 if there are none."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the variance at unmasked positions, with n - 1 in the denominator; 0 if n < 2."""
    squares = (values - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over unmasked positions; 0 at masked positions.

    Args:
        values: Any shape.
        mask: Same shape, nonzero at values that count.
    """
    inside = mask.bool()
    return torch.zeros_like(values).masked_scatter(inside, whiten(values[inside]))


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Shift and scale values `[M]` to mean 0 and variance 1.

    The computation is in float64. If all values are equal, the result is exactly 0.
    """
    if not len(values) or torch.equal(*values.aminmax()):
        return torch.zeros_like(values)
    centered = values.to(torch.float64, copy=True)
    centered -= centered.mean()
    variance = centered.dot(centered) / (len(values) - 1)
    return centered.mul_((variance + WHITENING_EPSILON).rsqrt()).to(values.dtype)


def compute_discounted_sums(values: torch.Tensor, decay: float) -> torch.Tensor:
    """Sum each row from every position to its end, with decay: s[i] = v[i] + decay * s[i + 1].

    Within a block of positions, this is a product with a triangular matrix of powers. The sums of
    whole blocks follow the same rule with `decay ** 32`, so the same function computes them. No
    power of the decay divides anything: a cumulative sum of v[i] * decay^i divided by decay^i, the
    usual formula, underflows within a long response.

    Args:
        values: `[B, N]`, floating point.
        decay: From 0 to 1.

    Returns:
        `[B, N]`, of the same dtype.
    """
    num_rows, width = values.shape
    if width <= _BLOCK:
        return values @ _powers(values, width, decay)
    blocks = pad(values, (0, -width % _BLOCK)).view(num_rows, -1, _BLOCK)
    within = blocks @ _powers(values, _BLOCK, decay)
    from_next = pad(compute_discounted_sums(within[..., 0], decay**_BLOCK)[:, 1:], (0, 1))
    reach = decay ** torch.arange(_BLOCK, 0, -1, dtype=values.dtype, device=values.device)
    return within.addcmul_(from_next[..., None], reach).flatten(1)[:, :width]


def _powers(like: torch.Tensor, size: int, decay: float) -> torch.Tensor:
    """Return `[size, size]`: decay ** (row - column) on and below the diagonal, 0 above."""
    steps = torch.arange(size, dtype=like.dtype, device=like.device)
    return (decay ** (steps[:, None] - steps).clamp(min=0)).tril()


@dataclass(frozen=True)
class TrainedTokenIndex:
    """Positions of the trained tokens of a batch, to remove masked positions and restore them.

    Code that computes on `take` (one row after the other) or `pack` (one row per line, from the
    left) cannot read a masked token (invariant: observations are invisible).

    Example:
        >>> tokens = TrainedTokenIndex.of(torch.tensor([[1, 0, 1], [0, 0, 1]]))
        >>> values = torch.tensor([[5, 6, 7], [8, 9, 4]])
        >>> tokens.take(values).tolist(), tokens.pack(values).tolist()
        ([5, 7, 4], [[5, 7], [4, 0]])
        >>> tokens.unpack(tokens.pack(values)).tolist()
        [[5, 0, 7], [0, 0, 4]]
    """

    shape: torch.Size
    """B and T."""
    lengths: torch.Tensor
    """`[B]` int64: trained tokens of each row."""
    sources: torch.Tensor
    """`[M]`: index of each trained token in the flattened `[B, T]`, in order."""

    @classmethod
    def of(cls, response_mask: torch.Tensor) -> "TrainedTokenIndex":
        """Find the trained tokens of a mask `[B, T]`, nonzero at trained tokens."""
        mask = response_mask.bool()
        num_rows, width = mask.shape
        sources = mask.flatten().nonzero().squeeze(dim=1)
        ends = torch.arange(num_rows + 1, device=mask.device) * width
        return cls(mask.shape, torch.searchsorted(sources, ends).diff(), sources)

    @cached_property
    def present(self) -> torch.Tensor:
        """`[B, N]` bool: true at the tokens of each packed row."""
        width = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        return torch.arange(width, device=self.lengths.device) < self.lengths[:, None]

    @cached_property
    def _targets(self) -> torch.Tensor:
        """`[M]`: index of each trained token in the flattened `[B, N]`."""
        num_rows, width = self.present.shape
        rows = torch.arange(num_rows, device=self.lengths.device)
        shifts = rows * width - (self.lengths.cumsum(dim=0) - self.lengths)
        shifts = shifts.repeat_interleave(self.lengths, output_size=len(self.sources))
        return shifts.add_(torch.arange(len(shifts), device=shifts.device))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the trained tokens' values from `[B, T]`, as `[M]`."""
        return values.flatten().index_select(0, self.sources)

    def put(self, taken: torch.Tensor) -> torch.Tensor:
        """Put values `[M]` at their tokens in `[B, T]`; masked positions get 0."""
        return _scatter(taken, self.sources, self.shape)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Move the trained tokens' values from `[B, T]` to the left of `[B, N]`, then zeros."""
        return self.pack_taken(self.take(values))

    def pack_taken(self, taken: torch.Tensor) -> torch.Tensor:
        """Put values `[M]` to the left of `[B, N]`, then zeros."""
        return _scatter(taken, self._targets, self.present.shape)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Move packed values `[B, N]` back to their tokens in `[B, T]`; masked positions get 0."""
        return self.put(self.take_packed(packed))

    def take_packed(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the trained tokens' values from packed `[B, N]`, as `[M]`."""
        return packed.flatten().index_select(0, self._targets)


def _scatter(taken: torch.Tensor, index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return taken.new_zeros(shape.numel()).index_copy_(0, index, taken).view(shape)
