"""Packing of padded rows into micro-batches without padding.

A row of the batch is `[prompt | response]` with padding at both ends. Its packed tokens end before
its last trained token: padding and later tokens have no effect on a trained log-probability
(attention is causal), so they are not computed. A row without a trained token is not computed.

The placeholder tokens of images and videos are packed like others. Two of them are equal only if
they are the same token of the same picture.

Shape key: B rows, L prompt + response, T response positions, S tokens of a packed micro-batch,
N trained positions of a packed micro-batch.
"""

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from agentrl.errors import DataError
from agentrl.media.positions import compute_position_ids
from agentrl.media.processor import MediaEncoder
from agentrl.media.records import MediaSpan
from agentrl.workers.attention_plan import AttentionPlan
from agentrl.workers.prefixes import Segment, mark_media, sort_rows
from agentrl.workers.vision_tower import PlacedMedia, place_media


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The columns of a batch that packing reads, on the CPU.

    Example:
        One row, prompt `7 8`, response `9 4 5 6` of which `9` and `5` are trained:
        `input_ids = [[0, 7, 8, 9, 4, 5, 6, 0]]`, `attention_mask = [[0, 1, 1, 1, 1, 1, 1, 0]]`,
        `response_mask = [[1, 0, 1, 0, 0]]`. It is packed as `7 8 9 4`, scored at `8` (for `9`)
        and at `4` (for `5`).
    """

    input_ids: Tensor
    """`[B, L]`, int64."""
    attention_mask: Tensor
    """`[B, L]`, 1 on tokens and 0 on padding, which is only at the ends."""
    response_mask: Tensor
    """`[B, T]`, nonzero on trained tokens; the response is the last T columns of L."""
    media: tuple[tuple[MediaSpan, ...], ...] | None = None
    """The runs of placeholder tokens of each row, which count from its first token; None: the run
    has no images or videos."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Concatenated sequences, and the positions of their trained tokens.

    Example:
        The row above alone: `input_ids = [[7, 8, 9, 4]]`, `position_ids = [[0, 1, 2, 3]]`,
        `head_positions = [1, 3]`, `targets = [9, 5]`, `rows = [0, 0]`, `columns = [0, 2]`.
    """

    input_ids: Tensor
    """`[1, S]`, int64."""
    position_ids: Tensor
    """`[1, S]`, int64; restart at 0 with each sequence. `[3, 1, S]` if some tokens are pictures."""
    head_positions: Tensor
    """`[N]`, int64: packed positions before a trained token."""
    targets: Tensor
    """`[N]`, int64: those next tokens."""
    rows: Tensor
    """`[N]`, int64: the row of each target, counted within this micro-batch."""
    columns: Tensor
    """`[N]`, int64: the response position of each target."""
    plan: AttentionPlan
    """The boundaries of the sequences, for attention."""
    row_index: tuple[int, ...]
    """The rows of the padded batch that this micro-batch holds; empty in a dummy."""
    response_length: int
    """T."""
    media: tuple[PlacedMedia, ...] = ()
    """The packed tokens that are pictures."""
    encoder: MediaEncoder | None = None
    """If several ranks compute and one of them has pictures: makes the picture with which a rank
    takes part in the collectives of the vision tower."""

    def unpack(self, values: Tensor) -> Tensor:
        """Put one value per target back to `[rows of this micro-batch, T]`; zeros elsewhere."""
        padded = values.new_zeros(len(self.row_index), self.response_length)
        return padded.index_put((self.rows, self.columns), values)


class RowPacker:
    """Packs rows of one padded batch into micro-batches; the shared prefixes are found once.

    Args:
        rows: The padded batch.
        index: The rows to pack; those without a trained token are left out.
        max_sharing_length: Rows of at most this many tokens share prefixes; 0: none does.
    """

    def __init__(
        self, rows: PaddedRows, index: Sequence[int], *, max_sharing_length: int = 0
    ) -> None:
        self.rows = rows
        starts, lengths = (span.tolist() for span in _spans(rows))
        self._index = [row for row in index if lengths[row] > 0]
        self._starts = [starts[row] for row in self._index]
        ids = rows.input_ids.numpy()
        tokens = [
            ids[row, start : start + lengths[row]]
            for row, start in zip(self._index, self._starts, strict=True)
        ]
        if rows.media is not None:
            tokens = mark_media(tokens, [rows.media[row] for row in self._index])
        self._sorted = sort_rows(tokens, max_length=max_sharing_length)

    @property
    def shares(self) -> bool:
        """Whether some rows share a prefix."""
        return bool(self._sorted.shared.any())

    def cut(self, budget: int) -> tuple[list[range], list[int]]:
        """Cut the rows into runs of at most `budget` tokens that stay together.

        Returns:
            The runs, and the number of tokens of each, shared ones counted once.
        """
        runs = self._sorted.cut(budget)
        return runs, [self._sorted.cost(run.start, run.stop) for run in runs]

    def pack(self, runs: Sequence[range], device: torch.device) -> PackedBatch:
        """Pack some runs into one micro-batch."""
        picked = self._sorted.take(runs)
        return _pack(
            self.rows,
            [self._index[row] for row in picked.order],
            [self._starts[row] for row in picked.order],
            picked.segments(),
            device,
        )


def count_tokens(rows: PaddedRows) -> list[int]:
    """Count the tokens of each row that are computed; 0 for a row without a trained token."""
    return _spans(rows)[1].tolist()


def pack_rows(
    rows: PaddedRows, index: Sequence[int], device: torch.device, *, max_sharing_length: int = 0
) -> PackedBatch:
    """Pack the rows `index` into one micro-batch.

    Args:
        rows: The padded batch, on the CPU.
        index: The rows; those without a trained token are left out.
        device: Of the packed tensors.
        max_sharing_length: As of `RowPacker`.
    """
    packer = RowPacker(rows, index, max_sharing_length=max_sharing_length)
    return packer.pack(packer.cut(sys.maxsize)[0], device)


def dummy_batch(
    response_length: int, device: torch.device, *, encoder: MediaEncoder | None = None
) -> PackedBatch:
    """Make a micro-batch of one token, which is not trained.

    A rank with fewer micro-batches runs it, so that all ranks take part in all collectives.

    Args:
        response_length: T.
        device: Of the packed tensors.
        encoder: As of `PackedBatch`.
    """
    zero, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=zero.to(device), position_ids=zero.to(device),
        head_positions=none.to(device), targets=none.to(device),
        rows=none.to(device), columns=none.to(device),
        plan=AttentionPlan((1,)), row_index=(), response_length=response_length, encoder=encoder,
    )  # fmt: skip


def count_micro_batches(lengths: Sequence[int], budget: int) -> int:
    """Count the micro-batches of at most `budget` tokens that these rows need.

    A row longer than the budget has a micro-batch to itself.
    """

    def fits(part: list[int]) -> bool:
        return len(part) <= 1 or sum(lengths[row] for row in part) <= budget

    count = min(len(lengths), -(-sum(lengths) // budget))
    while not all(map(fits, partition_balanced(lengths, count))):
        count += 1
    return count


def _spans(rows: PaddedRows) -> tuple[Tensor, Tensor]:
    """Return each row's first token and the number of its computed tokens, `[B]` each."""
    first = rows.attention_mask.ne(0).int().argmax(dim=1)
    trained = rows.response_mask.ne(0)
    num_response = trained.shape[1]
    offset = rows.input_ids.shape[1] - num_response
    columns = torch.arange(1, num_response + 1, device=trained.device)
    after_last = (trained * columns).amax(dim=1)
    end = offset + after_last - 1
    return first, torch.where(after_last > 0, end - first, 0)


def _pack(
    rows: PaddedRows,
    index: Sequence[int],
    starts: Sequence[int],
    segments: Sequence[Segment],
    device: torch.device,
) -> PackedBatch:
    """Concatenate the segments; a segment has the targets of each of its rows."""
    lengths = [segment.end - segment.start for segment in segments]
    row, position, packed = _place_tokens(segments, lengths)
    source, column = torch.tensor(index)[row], torch.tensor(starts)[row] + position
    num_response = rows.response_mask.shape[1]
    next_response = column + 1 - (rows.input_ids.shape[1] - num_response)
    mask = rows.response_mask[source, next_response.clamp(min=0)]
    head = ((next_response >= 0) & mask.ne(0)).nonzero().squeeze(1)
    if int(rows.response_mask[index].ne(0).sum()) != len(head):
        raise DataError(
            "a trained token has no token before it, or is in the padding",
            expected="a prompt before every response, and padding only at the ends of a row",
        )
    input_ids, position_ids = torch.zeros(2, 1, sum(lengths), dtype=torch.int64)
    # The rows of a segment write equal values.
    input_ids[0, packed], position_ids[0, packed] = rows.input_ids[source, column], position
    spans = [rows.media[row] if rows.media else () for row in index]
    if any(spans):
        position_ids = _place_positions(position_ids, spans, segments)
    return PackedBatch(
        input_ids=move_to_device(input_ids, device),
        position_ids=move_to_device(position_ids, device),
        head_positions=move_to_device(packed[head], device),
        targets=move_to_device(rows.input_ids[source[head], column[head] + 1], device),
        rows=move_to_device(row[head], device),
        columns=move_to_device(next_response[head], device),
        plan=AttentionPlan(tuple(lengths), tuple(segment.parent for segment in segments)),
        row_index=tuple(index),
        response_length=num_response,
        media=tuple(_place_pictures(spans, segments)),
    )


def _place_pictures(
    spans: Sequence[Sequence[MediaSpan]], segments: Sequence[Segment]
) -> Iterator[PlacedMedia]:
    """Locate the pictures of each segment, which all its rows have."""
    offset = 0
    for segment in segments:
        yield from place_media(spans[segment.first], segment.start, segment.end, offset)
        offset += segment.end - segment.start


def _place_positions(
    plain: Tensor, spans: Sequence[Sequence[MediaSpan]], segments: Sequence[Segment]
) -> Tensor:
    """Return the positions with three dimensions, `[3, 1, S]`."""
    positions, offset = plain.repeat(3, 1, 1), 0
    for segment in segments:
        end = offset + segment.end - segment.start
        if own := spans[segment.first]:
            found = compute_position_ids(own, segment.start, segment.end)
            positions[:, 0, offset:end] = torch.from_numpy(found)
        offset = end
    return positions


def _place_tokens(
    segments: Sequence[Segment], lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the position in it, and the packed position of each token of each row."""
    # One piece for each row of each segment: row, its segment's first token and packed position.
    pieces = torch.tensor(
        [
            (row, segment.start, offset, length)
            for segment, offset, length in zip(
                segments, accumulate(lengths, initial=0), lengths, strict=False
            )
            for row in range(segment.first, segment.last)
        ]
    )
    row, start, offset, length = pieces.unbind(1)
    piece = torch.repeat_interleave(length)
    within = torch.arange(len(piece)) - (length.cumsum(0) - length)[piece]
    return row[piece], start[piece] + within, offset[piece] + within


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def partition_balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition items so that the sums of the parts are similar: longest first, to the least sum.

    Equal arguments give equal parts.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": the largest sum is at most
    4/3 - 1/(3 num_parts) of the best one.

    Args:
        lengths: Of the items, none negative.
        num_parts: Parts, at least one.

    Returns:
        `num_parts` lists of indices into `lengths`; some are empty if there are fewer items.

    Example:
        >>> partition_balanced([5, 3, 3, 1], 2)
        [[0, 3], [1, 2]]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        load, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + lengths[item], part))
    return parts
