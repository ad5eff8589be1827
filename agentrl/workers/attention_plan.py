"""Which packed tokens attend to which."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """The segments of the packed tokens, and which earlier tokens each of them attends to.

    A segment attends causally to itself, and to all tokens of its parent, of the parent of that
    one, and so on. A sequence that shares no tokens is one segment without a parent. A segment is
    before its children, and its descendants follow it without a gap (depth first).

    Example:
        Two sequences `a b c d` and `a b e` are packed as `a b`, `c d`, `e`:
        `lengths = (2, 2, 1)`, `parents = (-1, 0, 0)`, `starts = (0, 2, 4)`, `ends = (2, 4, 5)`,
        `family_ends = (5, 4, 5)`.
    """

    lengths: tuple[int, ...]
    """Tokens of each segment, in packed order."""
    parents: tuple[int, ...] = ()
    """The index of each segment's parent; -1: it has none. Empty: no segment has one."""

    cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """What kernels make from the plan once for all layers."""

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The packed position after each segment."""
        return tuple(accumulate(self.lengths))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The packed position of each segment's first token."""
        return (0, *self.ends[:-1])

    @cached_property
    def family_ends(self) -> tuple[int, ...]:
        """The packed position after the last descendant of each segment."""
        found = list(self.ends)
        for segment in reversed(range(len(self.parents))):
            parent = self.parents[segment]
            if parent >= 0:
                found[parent] = max(found[parent], found[segment])
        return tuple(found)

    @cached_property
    def generations(self) -> tuple[tuple[int, ...], ...]:
        """The segments with children: those without a parent, then by the number of ancestors."""
        depths = list[int]()
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        inner = [
            [segment for segment in set(self.parents) if segment >= 0 and depths[segment] == depth]
            for depth in range(max(depths, default=0))
        ]
        return tuple(tuple(sorted(one)) for one in inner)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position of each segment's first token in its sequence."""
        found = list[int]()
        for parent in self.parents or (-1,) * len(self.lengths):
            found.append(0 if parent < 0 else found[parent] + self.lengths[parent])
        return tuple(found)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(add, self.offsets, self.lengths))

    def visible(self, window: int | None, device: torch.device) -> Tensor:
        """Return which keys (columns) each packed query (row) attends to, `[S, S]` bool."""
        sees = self.see(window, device)
        places = torch.arange(self.ends[-1], device=device)
        return sees(None, None, places[:, None], places[None, :])

    def see(self, window: int | None, device: torch.device) -> Any:
        """Return the rule of `flex_attention`: whether packed query q attends to packed key k."""
        lengths = torch.tensor(self.lengths, device=device)
        segment = torch.repeat_interleave(lengths, output_size=self.ends[-1])
        # A query at or after a key attends to it if its segment is of the family of the key's.
        until = torch.tensor(self.family_ends, device=device)[segment]
        shift = torch.tensor(self.offsets, device=device) - torch.tensor(self.starts, device=device)
        position = torch.arange(self.ends[-1], device=device) + shift[segment]

        def sees(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            allowed = (query >= key) & (query < until[key])
            if window is not None:
                allowed = allowed & (position[query] - position[key] < window)
            return allowed

        return sees
