"""Tokens that are weighed together. Shapes: B sequences, T positions, S spans."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.schema.correction import Level, Statistic
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens, turns or sequences: which one each token is of. Masked tokens are of none."""

    level: Level
    mask: Tensor
    """`[B, T]` bool."""
    of_token: Tensor | None
    """`[B, T]` int64: the number of each token's turn; None where a span is a token or a row."""
    num: int
    """S; some may have no token."""

    @classmethod
    def of(cls, level: Level, mask: Tensor, turn_ids: Tensor | None = None) -> "Spans":
        """Number the spans.

        Args:
            level: What a span is.
            mask: `[B, T]`, nonzero where a token is trained.
            turn_ids: `[B, T]`, the turn of each token in its sequence, for `turn`.

        Raises:
            ConfigError: for turns without `turn_ids`.
        """
        inside = mask.bool()
        if level != "turn":
            return cls(level, inside, None, len(mask) if level == "sequence" else mask.numel())
        if turn_ids is None:
            raise ConfigError("turns are weighed, and the batch has no turn_ids")
        turns = torch.where(inside, turn_ids, 0)
        most = int(turns.max()) + 1 if turns.numel() else 1
        row = torch.arange(len(mask), device=mask.device)[:, None]
        return cls(level, inside, row * most + turns, len(mask) * most)

    def count(self) -> Tensor:
        """`[S]` float64: tokens of each span."""
        return self.sum(self.mask)

    def is_there(self) -> Tensor:
        """`[S]` bool: whether a span has a token."""
        return self.count() > 0

    def sum(self, values: Tensor) -> Tensor:
        """`[S]` float64: sum of `values` `[B, T]` over each span."""
        exact = torch.where(self.mask, values, 0).double()
        if self.of_token is not None:
            zeros = exact.new_zeros(self.num)
            return zeros.index_add(0, self.of_token.reshape(-1), exact.reshape(-1))
        return exact.sum(dim=-1) if self.level == "sequence" else exact.reshape(-1)

    def mean(self, values: Tensor) -> Tensor:
        """`[S]` float64: mean of `values` over each span; 0 where there is no token."""
        return self.sum(values) / self.count().clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """`[S]` float64: largest of `values` in each span; 0 where there is no token."""
        exact = torch.where(self.mask, values.double(), -torch.inf)
        if self.of_token is not None:
            lowest = exact.new_full((self.num,), -torch.inf)
            places, flat = self.of_token.reshape(-1), exact.reshape(-1)
            found = lowest.scatter_reduce(0, places, flat, reduce="amax")
        else:
            found = exact.amax(dim=-1) if self.level == "sequence" else exact.reshape(-1)
        return torch.where(found == -torch.inf, 0.0, found)

    def reduce(self, values: Tensor, statistic: Statistic) -> Tensor:
        """`[S]` float64: a statistic of `values` over each span."""
        match statistic:
            case "mean":
                return self.mean(values)
            case "max":
                return self.max(values)
            case "sum" | "each":
                return self.sum(values)

    def on_tokens(self, values: Tensor) -> Tensor:
        """`[B, T]`: what `values` `[S]` says of each token's span; 0 where masked."""
        if self.of_token is not None:
            laid = values[self.of_token]
        else:
            laid = values[:, None] if self.level == "sequence" else values.view(self.mask.shape)
        return torch.where(self.mask, laid, torch.zeros_like(laid))
