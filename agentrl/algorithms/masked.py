"""Statistics, sums and layouts of the trained positions alone.

A value at a masked position, NaN included, has no effect. Shapes: B rows, T response positions,
M trained tokens of the batch, N trained tokens of the longest row.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad

WHITENING_EPSILON = 1e-8
"""Added to a variance before it divides."""
_BLOCK_TOKENS = 2**20
"""Tokens that are computed at a time: they stay in the last cache of a CPU. In smaller blocks the
threads of torch wait for each other more often, for a long time if other processes run."""
_BLOCK = 16
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
    return _place(whiten(_select(values, inside)), inside)


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Shift and scale values `[M]` to mean 0 and variance 1.

    The computation is in float64. If all values are equal, the result is exactly 0.
    """
    if not len(values) or torch.equal(*values.aminmax()):
        return torch.zeros_like(values)
    # One pass for both statistics, and one for the values. Sums of differences to any one of the
    # values lose at most len(values) times the precision of float64.
    blocks, first = values.split(_BLOCK_TOKENS // 4), values[0].item()
    total = squares = torch.zeros((), dtype=torch.float64, device=values.device)
    for block in blocks:
        differences = block.double().sub_(first)
        total, squares = total + differences.sum(), squares + differences.dot(differences)
    mean = total / len(values)
    variance = (squares - total * mean) / (len(values) - 1)
    shift, scale = first + mean, (variance + WHITENING_EPSILON).rsqrt()
    return torch.cat([block.double().sub_(shift).mul_(scale).to(values.dtype) for block in blocks])


def compute_discounted_sums(values: torch.Tensor, decay: float) -> torch.Tensor:
    """Sum each row from every position to its end, with decay: s[i] = v[i] + decay * s[i + 1].

    Within a block of positions, this is a product with a triangular matrix of powers. The sums of
    whole blocks follow the same rule with `decay ** 16`, so the same function computes them. No
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

    mask: torch.Tensor
    """`[B, T]` bool: true at trained tokens."""
    lengths: torch.Tensor
    """`[B]` int64: trained tokens of each row."""

    @classmethod
    def of(cls, response_mask: torch.Tensor) -> "TrainedTokenIndex":
        """Find the trained tokens of a mask `[B, T]`, nonzero at trained tokens."""
        mask = response_mask.bool()
        return cls(mask, count_trained(mask).long())

    @cached_property
    def present(self) -> torch.Tensor:
        """`[B, N]` bool: true at the tokens of each packed row."""
        # NumPy compares numbers of 32 bits four times as fast as torch on a CPU.
        lengths = self.lengths.cpu().numpy().astype(np.int32)
        width = max(int(lengths.max()), 1) if len(lengths) else 1
        present = np.arange(width, dtype=np.int32) < lengths[:, None]
        return torch.from_numpy(present).to(self.lengths.device)

    def split(self) -> list[tuple[slice, "TrainedTokenIndex"]]:
        """Split into blocks of rows that stay in the caches of a CPU; each has its own N.

        Returns:
            The rows of each block, and its index.
        """
        num_rows = max(_BLOCK_TOKENS // max(self.mask.shape[1], 1), 1)
        rows = [slice(at, at + num_rows) for at in range(0, len(self.mask), num_rows)]
        return [(block, TrainedTokenIndex(self.mask[block], self.lengths[block])) for block in rows]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the trained tokens' values from `[B, T]`, as `[M]`."""
        return _select(values, self.mask)

    def put(self, taken: torch.Tensor) -> torch.Tensor:
        """Put values `[M]` at their tokens in `[B, T]`; masked positions get 0."""
        return _place(taken, self.mask)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Move the trained tokens' values from `[B, T]` to the left of `[B, N]`, then zeros."""
        return self.pack_taken(self.take(values))

    def pack_taken(self, taken: torch.Tensor) -> torch.Tensor:
        """Put values `[M]` to the left of `[B, N]`, then zeros."""
        return _place(taken, self.present)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Move packed values `[B, N]` back to their tokens in `[B, T]`; masked positions get 0."""
        return self.put(self.take_packed(packed))

    def take_packed(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the trained tokens' values from packed `[B, N]`, as `[M]`."""
        return _select(packed, self.present)

    def following(self, taken: torch.Tensor) -> torch.Tensor:
        """Return `[M]`: the value `[M]` of the row's next trained token; 0 after the last one."""
        following = taken.roll(-1)
        following[self.lengths.cumsum(dim=0)[self.lengths > 0] - 1] = 0
        return following

    def sum_discounted(self, taken: torch.Tensor, decay: float) -> torch.Tensor:
        """Return `compute_discounted_sums` of each row's trained tokens, from and as `[M]`."""
        return self.take_packed(compute_discounted_sums(self.pack_taken(taken), decay))


def count_trained(mask: torch.Tensor) -> torch.Tensor:
    """Count the true positions of each row of a bool mask `[B, T]`, as int32 `[B]`."""
    # Bytes, summed as int32: a sum of booleans, or as int64, converts the whole mask first.
    return mask.view(torch.uint8).sum(dim=-1, dtype=torch.int32)


def zero_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` with 0 at masked positions, also if they are NaN there.

    Args:
        values: `[B, T]`, floating point, or `[B, 1]` for one value in each row; without gradient.
        mask: `[B, T]` bool.
    """
    if values.device.type != "cpu":
        return torch.where(mask, values, 0.0)
    # The bits of a value, and all ones or all zeros: half the time of `torch.where` on a CPU.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    ones = mask.view(torch.int8).neg().to(bits)
    return ones.bitwise_and_(values.detach().view(bits)).view(values.dtype)


def _select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # NumPy copies each run of true positions at once, four times as fast as torch on a CPU.
    if _is_array(values):
        return torch.from_numpy(values.numpy()[mask.numpy()])
    return values[mask]


def _place(taken: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    placed = taken.new_zeros(mask.shape)
    if _is_array(taken):
        placed.numpy()[mask.numpy()] = taken.numpy()
        return placed
    return placed.masked_scatter_(mask, taken)


def _is_array(values: torch.Tensor) -> bool:
    """Whether NumPy can read the memory of a tensor."""
    return (
        values.device.type == "cpu" and values.dtype != torch.bfloat16 and not values.requires_grad
    )
