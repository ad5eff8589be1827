"""Rows with padding -> packed micro-batches without: only tokens that some trained token sees.

A row of the batch is `[prompt | response]` with padding at both ends. What is computed of it is its
tokens up to the one before its last trained token: padding and everything behind the last trained
token can influence no trained log-probability (attention is causal), so neither is computed. A row
that trains on nothing is not computed at all.

Shape key: B rows, L prompt + response, T response positions, S tokens of a packed micro-batch,
N trained positions of a packed micro-batch.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import DataError
from agentrl.workers.attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """What packing reads of a batch, on any device.

    Example:
        One row, prompt `7 8`, response `9 4 5 6` of which `9` and `5` are trained:
        `input_ids = [[0, 7, 8, 9, 4, 5, 6, 0]]`, `attention_mask = [[0, 1, 1, 1, 1, 1, 1, 0]]`,
        `response_mask = [[1, 0, 1, 0, 0]]`. It is packed as `7 8 9 4`, scored at `8` (for `9`)
        and at `4` (for `5`).
    """

    input_ids: Tensor
    """`[B, L]`, int64."""
    attention_mask: Tensor
    """`[B, L]`, 1 on tokens and 0 on padding, which stands only at the ends."""
    response_mask: Tensor
    """`[B, T]`, nonzero on trained tokens; the response is the last T columns of L."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences end to end, and where the scores of their trained tokens belong.

    Example:
        The row above alone: `input_ids = [[7, 8, 9, 4]]`, `position_ids = [[0, 1, 2, 3]]`,
        `head_positions = [1, 3]`, `targets = [9, 5]`, `rows = [0, 0]`, `columns = [0, 2]`.
    """

    input_ids: Tensor
    """`[1, S]`, int64."""
    position_ids: Tensor
    """`[1, S]`, int64; restart at 0 with each sequence."""
    head_positions: Tensor
    """`[N]`, int64: packed positions whose next token is trained."""
    targets: Tensor
    """`[N]`, int64: those next tokens."""
    rows: Tensor
    """`[N]`, int64: the row of each target, counted within this micro-batch."""
    columns: Tensor
    """`[N]`, int64: the response position of each target."""
    plan: AttentionPlan
    """Which packed tokens attend to which."""
    row_index: tuple[int, ...]
    """The rows of the padded batch that this micro-batch holds; empty in a dummy."""
    response_length: int
    """T."""

    def unpack(self, values: Tensor) -> Tensor:
        """Put one value for each target back to `[rows of this micro-batch, T]`, zeros between."""
        padded = values.new_zeros(len(self.row_index), self.response_length)
        return padded.index_put((self.rows, self.columns), values)


def count_tokens(rows: PaddedRows) -> list[int]:
    """Count the tokens of each row that have to be computed; 0 where nothing is trained."""
    return _spans(rows)[1].tolist()


def pack_rows(rows: PaddedRows, index: Sequence[int], device: torch.device) -> PackedBatch:
    """Pack the rows `index` end to end, longest first.

    Args:
        rows: The padded batch.
        index: Rows to take; each must train on something.
        device: Where the packed tensors are put.
    """
    starts, lengths = _spans(rows)
    order = sorted(index, key=lambda row: -int(lengths[row]))
    picked = torch.tensor(order, dtype=torch.int64)
    return _pack(rows, picked, starts[picked], lengths[picked], device)


def dummy_batch(response_length: int, device: torch.device) -> PackedBatch:
    """Make a micro-batch of one token that trains on nothing.

    A rank with less work than the others runs it, so that all take part in as many collectives.
    """
    zero, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=zero.to(device), position_ids=zero.to(device),
        head_positions=none.to(device), targets=none.to(device),
        rows=none.to(device), columns=none.to(device),
        plan=AttentionPlan((1,)), row_index=(), response_length=response_length,
    )  # fmt: skip


def count_micro_batches(lengths: Sequence[int], budget: int) -> int:
    """Count the micro-batches of at most `budget` tokens that these rows need.

    A row longer than the budget has a micro-batch to itself.
    """
    count = min(len(lengths), -(-sum(lengths) // budget))
    while not _fits(lengths, count, budget):
        count += 1
    return count


def _fits(lengths: Sequence[int], count: int, budget: int) -> bool:
    parts = partition_balanced(lengths, count)
    return all(len(part) <= 1 or sum(lengths[row] for row in part) <= budget for part in parts)


def _spans(rows: PaddedRows) -> tuple[Tensor, Tensor]:
    """First token of each row and how many are computed, `[B]` each."""
    first = rows.attention_mask.ne(0).int().argmax(dim=1)
    trained = rows.response_mask.ne(0)
    num_response = trained.shape[1]
    offset = rows.input_ids.shape[1] - num_response
    columns = torch.arange(1, num_response + 1, device=trained.device)
    behind_last = (trained * columns).amax(dim=1)
    end = offset + behind_last - 1
    return first, torch.where(behind_last > 0, end - first, 0)


def _check_scored(response_mask: Tensor, head: Tensor) -> None:
    if int(response_mask.ne(0).sum()) != len(head):
        raise DataError(
            "a trained token has no token before it, or stands in the padding",
            expected="a prompt before every response, and padding only at the ends of a row",
        )


def _pack(
    rows: PaddedRows, picked: Tensor, starts: Tensor, lengths: Tensor, device: torch.device
) -> PackedBatch:
    sequence = torch.repeat_interleave(torch.arange(len(picked)), lengths)
    ends = lengths.cumsum(0)
    positions = torch.arange(len(sequence)) - (ends - lengths)[sequence]
    columns = starts[sequence] + positions
    source = picked[sequence]
    num_response = rows.response_mask.shape[1]
    next_response = columns + 1 - (rows.input_ids.shape[1] - num_response)
    mask = rows.response_mask[source, next_response.clamp(min=0)]
    head = ((next_response >= 0) & mask.ne(0)).nonzero().squeeze(1)
    _check_scored(rows.response_mask[picked], head)
    return PackedBatch(
        input_ids=rows.input_ids[source, columns].unsqueeze(0).to(device),
        position_ids=positions.unsqueeze(0).to(device),
        head_positions=head.to(device),
        targets=rows.input_ids[source[head], columns[head] + 1].to(device),
        rows=sequence[head].to(device),
        columns=next_response[head].to(device),
        plan=AttentionPlan(tuple(lengths.tolist())),
        row_index=tuple(picked.tolist()),
        response_length=num_response,
    )


def partition_balanced(
    lengths: Sequence[int],
    num_parts: int,
    *,
    groups: Sequence[Hashable] | None = None,
    equal_counts: bool = False,
) -> list[list[int]]:
    """Deal items to parts whose sums differ as little as longest-first dealing makes them.

    Equal arguments give equal parts.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": the largest sum is at most
    4/3 - 1/(3 num_parts) of the best one, where neither groups nor counts are asked for.

    Args:
        lengths: Of the items, none negative.
        num_parts: Parts, at least one.
        groups: The group of each item: a group's items come to one part. None: each for itself.
        equal_counts: Whether the parts' numbers of items (of groups, where there are any) may
            differ by one at most. Sums then balance less.

    Returns:
        `num_parts` lists of indices into `lengths`; some are empty where there are fewer items.

    Example:
        >>> partition_balanced([5, 3, 3, 1], 2)
        [[0, 3], [1, 2]]
        >>> partition_balanced([5, 3, 3, 1], 2, groups=["a", "a", "b", "b"])
        [[0, 1], [2, 3]]
    """
    units = _gather_units(len(lengths), groups)
    sums = [sum(lengths[item] for item in unit) for unit in units]
    dealt = _deal_evenly(sums, num_parts) if equal_counts else _deal(sums, num_parts)
    return [[item for unit in part for item in units[unit]] for part in dealt]


def _gather_units(count: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    """The items that are dealt together, in the order of the first of each."""
    if groups is None:
        return [[item] for item in range(count)]
    units: dict[Hashable, list[int]] = defaultdict(list)
    for item, group in zip(range(count), groups, strict=True):
        units[group].append(item)
    return list(units.values())


def _longest_first(sums: Sequence[int]) -> list[int]:
    return sorted(range(len(sums)), key=lambda unit: -sums[unit])


def _deal(sums: Sequence[int], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for unit in _longest_first(sums):
        load, part = heap[0]
        parts[part].append(unit)
        heapq.heapreplace(heap, (load + sums[unit], part))
    return parts


def _deal_evenly(sums: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deal in rounds: each part gets one unit of a round, the longest to that with the least."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    order = _longest_first(sums)
    for start in range(0, len(order), num_parts):
        by_load = sorted(range(num_parts), key=lambda part: (loads[part], part))
        for unit, part in zip(order[start : start + num_parts], by_load, strict=False):
            parts[part].append(unit)
            loads[part] += sums[unit]
    return parts
