"""Contiguous keys and values of the sequences that decode, for attention on a CPU.

A sequence that gets one token a step would copy all of its pages in every layer of every step. So
it gets a row of a table instead: its pages are copied once, and each step appends in place. The
pages are written too, for the sequences that will share them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

SMALLEST_TABLE = 64
"""Least tokens of a table's rows."""
SPARE_ROWS_FRAC = 0.25
"""Rows that a table is larger by than needed, so that it is not allocated again at each arrival."""


class Member(NamedTuple):
    """A sequence that gets one token in this step."""

    key: str
    """Unique among the running sequences."""
    row: int
    """Its row in the packed batch."""
    past: int
    """Its tokens that are already in the cache."""
    page_rows: Sequence[int]
    """Where its pages are, in order."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Sequences whose pages are copied into a table in this step."""

    slots: torch.Tensor
    """[J] int64: their rows in the table."""
    page_rows: torch.Tensor
    """[J * P] int64: page rows to read; any row where padded."""


@dataclass(slots=True)
class Table:
    """Sequences of similar length. Row r belongs to the r-th sequence; no row is unused."""

    capacity: int
    """Tokens of a row."""
    num_rows: int = 0
    """Allocated rows."""
    slots: dict[str, int] = field(default_factory=dict[str, int])
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of each sequence in its row."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )
    """Keys and values of a layer, [num_rows, H, capacity, D] each."""

    def place(self, members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
        """Give each member a row; return them in the order of rows, and those that are new there.

        A sequence beyond the last row, because others have ended, moves to a free row.
        """
        count = len(members)
        if count > self.num_rows:
            self.num_rows = count + int(count * SPARE_ROWS_FRAC)
            self.slots, self.layers = {}, {}
        kept = {
            member.key: slot
            for member in members
            if (slot := self.slots.get(member.key, count)) < count
            and self.lengths[member.key] == member.past
        }
        free = iter(sorted(set(range(count)).difference(kept.values())))
        joined = [member for member in members if member.key not in kept]
        self.slots = kept | {member.key: next(free) for member in joined}
        self.lengths = {member.key: member.past + 1 for member in members}
        return sorted(members, key=lambda member: self.slots[member.key]), joined

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values. Unused memory is zero: masked NaN would spread.

        Args:
            index: The layer.
            like: [..., H, T, D], keys of this model.
        """
        if index not in self.layers:
            shape = (self.num_rows, like.shape[-3], self.capacity, like.shape[-1])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences of one table in one step."""

    table: Table
    rows: torch.Tensor
    """[B] int64: their rows in the packed batch, in the order of the table's rows."""
    positions: torch.Tensor
    """[B] int64: where in its row each sequence's new key and value are written."""
    bias: torch.Tensor
    """[B, 1, 1, K] float32: 0 where a sequence has a token, else -inf."""
    joined: Joined | None

    @classmethod
    def of(cls, table: Table, members: Sequence[Member]) -> "DecodeRows":
        """Place the members in the table."""
        ordered, joined = table.place(members)
        positions = torch.tensor([member.past for member in ordered])
        length = int(positions.max()) + 1
        is_masked = torch.arange(length) > positions.unsqueeze(1)
        bias = torch.zeros(is_masked.shape).masked_fill_(is_masked, -math.inf)
        return cls(
            table=table,
            rows=torch.tensor([member.row for member in ordered]),
            positions=positions,
            bias=bias[:, None, None],
            joined=_pages_of(joined, table) if joined else None,
        )

    def append(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values to the table; return all of them.

        Args:
            layer: The layer's index.
            key: [1, H, T, D], of the packed batch.
            value: [1, H, T, D].
            pages: The layer's pages of keys and of values, [page rows, page_size * H * D].

        Returns:
            Keys and values of the sequences, [B, H, K, D], views of the table.
        """
        count, length = self.bias.shape[0], self.bias.shape[-1]
        every = torch.arange(count)
        for store, new, own_pages in zip(
            self.table.layer(layer, key), (key, value), pages, strict=True
        ):
            if self.joined is not None:
                slots = self.joined.slots
                read = own_pages.index_select(0, self.joined.page_rows)
                read = read.view(len(slots), -1, key.shape[1], key.shape[3]).transpose(1, 2)
                read = read[:, :, : self.table.capacity]
                store[slots, :, : read.shape[2]] = read
            store[every, :, self.positions] = new[0].index_select(1, self.rows).transpose(0, 1)
        keys, values = self.table.layer(layer, key)
        return keys[:count, :, :length], values[:count, :, :length]


class DecodeCache:
    """The tables, by length. A sequence that outgrows its row moves to the next table."""

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}

    def plan(self, members: Iterable[Member]) -> tuple[DecodeRows, ...]:
        """Place the sequences of a step. Tables that have none are freed."""
        groups: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            groups[_capacity(member.past + 1)].append(member)
        self._tables = {size: self._tables.get(size) or Table(size) for size in sorted(groups)}
        return tuple(DecodeRows.of(table, groups[size]) for size, table in self._tables.items())

    def clear(self) -> None:
        """Forget every sequence and free the memory."""
        self._tables = {}


def _capacity(length: int) -> int:
    """Return the least of 64, 96, 128, 192, 256, 384, ... that is not below `length`."""
    size = max(SMALLEST_TABLE, 1 << (length - 1).bit_length())
    smaller = size * 3 // 4
    return smaller if smaller > SMALLEST_TABLE and length <= smaller else size


def _pages_of(members: Sequence[Member], table: Table) -> Joined:
    longest = max(len(member.page_rows) for member in members)
    padded = [[*m.page_rows, *[0] * (longest - len(m.page_rows))] for m in members]
    return Joined(
        slots=torch.tensor([table.slots[member.key] for member in members]),
        page_rows=torch.tensor(padded).flatten(),
    )
