"""Which rows begin with the same tokens, so that these tokens are computed once.

The rows are sorted by their tokens. Rows with a common prefix are then neighbors, and the lengths
of the prefixes that neighbors share describe the whole tree of prefixes: a run of rows shares the
least of the lengths between them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.media.records import MediaSpan

MIN_SHARED_TOKENS = 8
"""A shorter common part is computed for each row: one more call of attention costs more."""


class Segment(NamedTuple):
    """Tokens `start` to `end` of the rows `first` to `last`, which are equal in all of them."""

    first: int
    last: int
    """After the last row."""
    start: int
    end: int
    """After the last token."""
    parent: int
    """Index of the segment with the tokens before `start`; -1: there are none."""


class SortedRows(NamedTuple):
    """Rows in the order of their tokens."""

    order: list[int]
    """The index of each row."""
    lengths: NDArray[np.int64]
    """Tokens of each row."""
    shared: NDArray[np.int64]
    """Tokens that each row shares with the row before it; 0 for the first."""

    def cost(self, first: int, last: int) -> int:
        """Count the tokens of the rows `first` to `last` with shared ones counted once."""
        own = self.lengths[first:last].sum() - self.shared[first + 1 : last].sum()
        return int(own)

    def cut(self, budget: int) -> list[range]:
        """Cut into runs of at most `budget` tokens.

        Rows with a common prefix stay together if they fit. Rows that share nothing are in
        different runs. A row longer than the budget is a run.
        """
        todo, runs = _children(self.shared, 0, len(self.order), 0)[::-1], list[range]()
        while todo:
            first, last = todo.pop()
            if last - first > 1 and self.cost(first, last) > budget:
                least = int(self.shared[first + 1 : last].min())
                todo += _children(self.shared, first, last, least)[::-1]
            elif runs and self.shared[first] and self.cost(runs[-1].start, last) <= budget:
                runs[-1] = range(runs[-1].start, last)
            else:
                runs.append(range(first, last))
        return runs

    def take(self, runs: Sequence[range]) -> "SortedRows":
        """Return the rows of some runs, of which each two share nothing."""
        picked = [row for run in runs for row in run]
        shared = self.shared[picked]
        shared[np.cumsum([0, *map(len, runs[:-1])])] = 0
        return SortedRows([self.order[row] for row in picked], self.lengths[picked], shared)

    def segments(self) -> list[Segment]:
        """Return the tree of prefixes: each segment once, after its parent and before its siblings'
        successors (depth first).
        """
        found, todo = list[Segment](), [(0, len(self.order), 0, -1)]
        while todo:
            first, last, start, parent = todo.pop()
            alone = last - first == 1
            end = int(self.lengths[first] if alone else self.shared[first + 1 : last].min())
            if end > start:
                found.append(Segment(first, last, start, end, parent))
                parent = len(found) - 1
            if not alone:
                below = _children(self.shared, first, last, end)
                todo += [(*child, end, parent) for child in reversed(below)]
        return found


def mark_media(
    tokens: Sequence[NDArray[np.int64]], media: Sequence[Sequence[MediaSpan]]
) -> list[NDArray[np.int64]]:
    """Replace placeholder tokens by negative numbers, one for each token of each picture.

    Args:
        tokens: Of each row.
        media: The runs of placeholder tokens of each row; they may end after its tokens.
    """
    firsts, count, marked = dict[tuple[str, str], int](), 0, list[NDArray[np.int64]]()
    for row, spans in zip(tokens, media, strict=True):
        own = row.copy() if spans else row
        for span in spans:
            if span.item.key not in firsts:
                firsts[span.item.key] = count
                count += span.item.num_tokens
            first = firsts[span.item.key] + span.offset
            numbers = -1 - np.arange(first, first + span.end - span.start)
            part = own[span.start : span.end]
            part[:] = numbers[: len(part)]
        marked.append(own)
    return marked


def sort_rows(tokens: Sequence[NDArray[np.int64]], *, max_length: int) -> SortedRows:
    """Sort rows by their tokens and find what neighbors share.

    Args:
        tokens: Of each row.
        max_length: Rows with more tokens share nothing; 0: no row does.
    """
    if not max_length:
        order = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))
    else:
        keys = [row.astype(">i4").tobytes() for row in tokens]
        order = sorted(range(len(tokens)), key=keys.__getitem__)
    lengths = np.array([len(tokens[row]) for row in order], dtype=np.int64)
    shared = np.zeros_like(lengths)
    for place in range(1, len(order)):
        if max(lengths[place - 1], lengths[place]) <= max_length:
            shared[place] = _count_equal(tokens[order[place - 1]], tokens[order[place]])
    _drop_short(shared)
    return SortedRows(order, lengths, shared)


def _count_equal(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _children(
    shared: NDArray[np.int64], first: int, last: int, least: int
) -> list[tuple[int, int]]:
    """Cut a run of rows where neighbors share no more than `least`."""
    cuts = np.flatnonzero(shared[first + 1 : last] == least) + first + 1
    bounds = [first, *cuts.tolist(), last]
    return [(start, end) for start, end in pairwise(bounds) if start < end]


def _drop_short(shared: NDArray[np.int64]) -> None:
    """Lower the shared lengths that are less than `MIN_SHARED_TOKENS` above the next lower one."""
    todo = [(0, len(shared), 0)]
    while todo:
        first, last, depth = todo.pop()
        if last - first < 2:
            continue
        least = int(shared[first + 1 : last].min())
        level = least if least - depth >= MIN_SHARED_TOKENS else depth
        below = _children(shared, first, last, least)
        shared[[start for start, _ in below[1:]]] = level
        todo += [(start, end, level) for start, end in below]
