"""Rows without what is masked: their trained tokens alone.

Shapes: B rows, T response positions, M trained tokens of the batch, N of the row that has most.

What works on these cannot see a masked token, wherever it stands (observations are invisible). They
lie one row behind the other (`take`, `place`), or side by side from the left (`pack`, `unpack`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch


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
