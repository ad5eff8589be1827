"""Statistics over trained positions alone; what stands elsewhere, NaN included, has no effect."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

WHITENING_EPSILON = 1e-8
"""Added to a variance that is divided by."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the values at unmasked positions."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the values at unmasked positions; 0 where there are none."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Variance at unmasked positions, with n - 1 in the denominator; 0 where n < 2."""
    squares = (values - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over unmasked positions; 0 elsewhere.

    Computed in float64. Values that are all equal become exactly 0 (equal rewards train nothing).

    Args:
        values: Any shape.
        mask: Same shape, nonzero where a value counts.
    """
    inside = mask.bool()
    seen = values[inside].double()
    is_constant = (seen == seen[:1]).all()
    centred = seen - seen.sum() / max(seen.numel(), 1)
    variance = centred.square().sum() / max(seen.numel() - 1, 1)
    whitened = torch.where(is_constant, 0.0, centred * (variance + WHITENING_EPSILON).rsqrt())
    return torch.zeros_like(values).masked_scatter(inside, whitened.to(values.dtype))


_BLOCK = 64
"""Positions that one matrix product sums."""


def compute_discounted_sums(values: torch.Tensor, decay: float) -> torch.Tensor:
    """Sum each row from every position to its end, later values decayed.

    s[i] = v[i] + decay * s[i + 1]. Within a block that is a product with a triangular matrix of
    powers; the sums of whole blocks follow the same rule with `decay ** 64`, so they come from the
    same function. No power above 64 of the decay is ever divided by: the usual trick, a cumulative
    sum of v[i] * decay^i divided by decay^i, underflows within a long response.

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
    return torch.addcmul(within, from_next[..., None], reach).flatten(1)[:, :width]


def _powers(like: torch.Tensor, size: int, decay: float) -> torch.Tensor:
    """`[size, size]`: decay ** (row - column) on and below the diagonal, 0 above."""
    steps = torch.arange(size, dtype=like.dtype, device=like.device)
    return (decay ** (steps[:, None] - steps).clamp(min=0)).tril()


@dataclass(frozen=True)
class TrainedTokens:
    """Where the trained tokens of a batch stand.

    Example:
        >>> tokens = TrainedTokens.of(torch.tensor([[1, 0, 1], [0, 0, 1]]))
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
    """`[M]`: place of each trained token in the flattened `[B, T]`, in order."""

    @classmethod
    def of(cls, response_mask: torch.Tensor) -> "TrainedTokens":
        """Find the trained tokens of a mask `[B, T]`, nonzero where a token is trained."""
        mask = response_mask.bool()
        num_rows, width = mask.shape
        sources = _places(mask)
        ends = torch.arange(num_rows + 1, device=mask.device) * width
        return cls(mask.shape, torch.searchsorted(sources, ends).diff(), sources)

    @cached_property
    def present(self) -> torch.Tensor:
        """`[B, N]` bool: whether a packed row has so many tokens."""
        width = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        return torch.arange(width, device=self.lengths.device) < self.lengths[:, None]

    @cached_property
    def _targets(self) -> torch.Tensor:
        """`[M]`: place of each trained token in the flattened `[B, N]`."""
        return _places(self.present)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Values `[B, T]` of the trained tokens alone, `[M]`, one row behind the other."""
        return values.take(self.sources)

    def place(self, taken: torch.Tensor) -> torch.Tensor:
        """Lay values `[M]` on their tokens, `[B, T]`; 0 on masked ones."""
        return _lay(taken, self.sources, self.shape)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Move the trained tokens' values `[B, T]` to the left, `[B, N]`; 0 behind them."""
        return self.pack_taken(self.take(values))

    def pack_taken(self, taken: torch.Tensor) -> torch.Tensor:
        """Lay values `[M]` side by side from the left, `[B, N]`; 0 behind them."""
        return _lay(taken, self._targets, self.present.shape)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Move packed values `[B, N]` back to their tokens, `[B, T]`; 0 on masked ones."""
        return self.place(self.take_packed(packed))

    def take_packed(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed values `[B, N]` of the trained tokens alone, `[M]`."""
        return packed.take(self._targets)


def _places(mask: torch.Tensor) -> torch.Tensor:
    return mask.flatten().nonzero().squeeze(dim=1)


def _lay(taken: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return taken.new_zeros(shape.numel()).index_copy_(0, places, taken).view(shape)
