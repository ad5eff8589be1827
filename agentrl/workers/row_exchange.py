"""Move rows between ranks, so that all ranks compute about the same number of tokens.

A rank owns the rows that it rolled out. Files, metrics and credit use these. For a forward or
backward pass the rows move to the ranks that compute them, and results of rows move back.

The ranks are divided into data-parallel groups of equal size, in the order of the ranks. All ranks
of a group compute the same rows; without sequence parallelism each rank is a group of its own.
"""

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from agentrl.workers.distributed import World
from agentrl.workers.packing import partition_balanced

T = TypeVar("T")

_MIN_GAIN = 0.03
"""Rows move only if the slowest rank computes at least this share fewer tokens."""
_MAX_EXCESS = 0.05
"""Groups stay together if the largest part is at most this share above that of single rows."""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The way of rows to the ranks that compute them, and of results back to their owners.

    Example:
        Rank 0 owns rows of 9 and 1 tokens, rank 1 rows of 3 and 5. With two groups `parts` is
        `[[0], [1, 2, 3]]`: the second row of rank 0 moves to rank 1, which receives it first.
    """

    world: World
    starts: tuple[int, ...]
    """Number of the first row of each rank, and the number of all rows; rows are numbered over all
    ranks, in their order."""
    parts: tuple[tuple[int, ...], ...]
    """The rows that each group computes, ascending."""
    mini_batches: list[list[int]]
    """The rows of each mini-batch, as indices of the rows that this rank computes."""
    is_needed: bool
    """Whether rows move; if not, every rank computes its own."""

    @property
    def computed(self) -> tuple[int, ...]:
        """Numbers of the rows that this rank computes, in the order of `send`."""
        if not self.is_needed:
            return tuple(range(*self.starts[self.world.rank : self.world.rank + 2]))
        return self.parts[self.world.dp_rank]

    def send(self, rows: Tensor) -> Tensor:
        """Give this rank the rows that it computes. A collective.

        Args:
            rows: `[b, ...]`: its own rows; dtype and other sizes are the same on all ranks.
        """
        if not self.is_needed:
            return rows
        sent, start = self._sent(), self.starts[self.world.rank]
        index = torch.tensor([row - start for part in sent for row in part], dtype=torch.int64)
        received = np.histogram(self.computed, bins=self.starts)[0].tolist()
        return self.world.exchange_rows(rows[index], [len(part) for part in sent], received)

    def send_objects(self, rows: Sequence[T]) -> list[T]:
        """Do the same for objects, one for each row. A collective.

        What several rows for one rank refer to is sent to it once.
        """
        if not self.is_needed:
            return list(rows)
        world, start = self.world, self.starts[self.world.rank]
        parts = [pickle.dumps([rows[row - start] for row in part]) for part in self._sent()]
        sizes = [len(part) for part in parts]
        received = [each[world.rank] for each in world.gather(sizes)]
        outgoing = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        incoming = world.exchange_rows(outgoing, sizes, received).numpy().tobytes()
        bounds = pairwise(accumulate(received, initial=0))
        return [row for begin, end in bounds for row in pickle.loads(incoming[begin:end])]

    def send_back(self, values: Tensor) -> Tensor:
        """Give each owner the results of its rows; the first rank of a group sends. A collective.

        Args:
            values: `[number of computed rows, ...]`.
        """
        if not self.is_needed:
            return values
        world, copies = self.world, self.world.size // self.world.dp_size
        is_sender = world.rank % copies == 0
        sent = np.histogram(self.computed if is_sender else [], bins=self.starts)[0].tolist()
        parts = [self._own(part) for part in self.parts]
        received = [0] * world.size
        received[::copies] = map(len, parts)
        found = world.exchange_rows(values if is_sender else values[:0], sent, received)
        start = self.starts[world.rank]
        index = torch.tensor([row - start for part in parts for row in part], dtype=torch.int64)
        return torch.empty_like(found).index_copy_(0, index.to(found.device), found)

    def _sent(self) -> list[list[int]]:
        """Return the rows that this rank sends to each rank."""
        copies = self.world.size // self.world.dp_size
        return [self._own(part) for part in self.parts for _ in range(copies)]

    def _own(self, rows: Sequence[int]) -> list[int]:
        start, end = self.starts[self.world.rank : self.world.rank + 2]
        return [row for row in rows if start <= row < end]


def plan_exchange(
    world: World,
    lengths: Sequence[int],
    groups: Sequence[Hashable],
    mini_batches: Sequence[Sequence[int]] | None = None,
) -> RowExchange:
    """Plan which ranks compute which rows. A collective.

    Each data-parallel group computes about the same number of tokens of each mini-batch. Samples of
    a prompt stay together if the balance allows it, because they share a prefix.

    Args:
        world: The ranks.
        lengths: Tokens of this rank's rows; 0 for a row that is not computed.
        groups: The group of samples of each row.
        mini_batches: This rank's rows of each mini-batch, as many lists on every rank; None: all
            rows are one.
    """
    batches = [list(rows) for rows in mini_batches or [range(len(lengths))]]
    if world.is_alone:
        return RowExchange(world, (0, len(lengths)), (), batches, is_needed=False)
    shares = world.gather((lengths, groups, batches))
    starts = tuple(np.cumsum([0, *(len(share) for share, _, _ in shares)]).tolist())
    all_lengths = [length for share, _, _ in shares for length in share]
    all_groups = [group for _, share, _ in shares for group in share]
    parts: list[list[int]] = [[] for _ in range(world.dp_size)]
    computed, load, best = list[list[int]](), 0, 0
    for number in range(len(batches)):
        owned = [
            [start + row for row in share[number]]
            for start, (_, _, share) in zip(starts, shares, strict=False)
        ]
        index = [row for rows in owned for row in rows]
        tokens = [all_lengths[row] for row in index]
        found = assign_rows(tokens, [all_groups[row] for row in index], world.dp_size)
        load += max(sum(all_lengths[row] for row in rows) for rows in owned)
        best += max(sum(tokens[row] for row in part) for part in found)
        for part, rows in zip(parts, found, strict=True):
            part += [index[row] for row in rows]
        computed.append([index[row] for row in found[world.dp_rank]])
    if world.dp_size == world.size and best >= load * (1 - _MIN_GAIN):
        return RowExchange(world, starts, (), batches, is_needed=False)
    parts = [sorted(part) for part in parts]
    position = {row: index for index, row in enumerate(parts[world.dp_rank])}
    batches = [sorted(position[row] for row in rows) for rows in computed]
    return RowExchange(world, starts, tuple(map(tuple, parts)), batches, is_needed=True)


def assign_rows(
    lengths: Sequence[int], groups: Sequence[Hashable], num_parts: int
) -> list[list[int]]:
    """Assign rows to parts with about the same number of tokens.

    The rows in the order of their groups are cut into contiguous parts, so that at most
    `num_parts - 1` groups are in two parts. If single rows balance better by 5 %, they are
    assigned one by one. Equal arguments give equal parts.

    Example:
        >>> assign_rows([4, 4, 4, 4], ["a", "b", "a", "b"], 2)
        [[0, 2], [1, 3]]
    """

    def largest(parts: list[list[int]]) -> int:
        return max(sum(lengths[row] for row in part) for part in parts)

    together = _cut(lengths, groups, num_parts)
    apart = partition_balanced(lengths, num_parts)
    return together if largest(together) <= (1 + _MAX_EXCESS) * largest(apart) else apart


def _cut(lengths: Sequence[int], groups: Sequence[Hashable], num_parts: int) -> list[list[int]]:
    """Cut the rows, sorted by group, so that the largest part is as small as possible."""
    number = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(lengths)), key=lambda row: number[groups[row]])
    ends = np.cumsum([lengths[row] for row in order])
    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(ends, limit)) <= num_parts:
            high = limit
        else:
            low = limit + 1
    bounds = [0, *_fill(ends, low)]
    parts = [order[start:end] for start, end in pairwise(bounds)]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _fill(ends: np.ndarray, limit: int) -> list[int]:
    """Fill contiguous parts one after the other up to `limit` tokens; return their ends."""
    bounds, end = list[int](), 0
    while end < len(ends):
        before = ends[end - 1] if end else 0
        end = int(np.searchsorted(ends, before + limit, side="right"))
        bounds.append(end)
    return bounds
