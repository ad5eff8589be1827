"""Discounted sums along rows, a block at a time. Shapes: B rows, N positions."""

import torch
from torch.nn.functional import pad

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
