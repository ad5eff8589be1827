"""Attention over transformers' paged cache, and access to that cache in each of its releases."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.engines.transformers.decode_cache import DecodeCache, DecodeRows, Member

if TYPE_CHECKING:
    from agentrl.engines.transformers.paged_kernel import PagedKernel, PageReader

ATTENTION_NAME = "agentrl_paged"
MAX_MASK_ELEMENTS = 2 * 2**20
"""Most elements of one chunk's mask, which limits its memory."""
MAX_PADDING = 1.5
"""Largest ratio of the longest sequence of a chunk to its first."""


class LayerPages(NamedTuple):
    """One layer's share of the cache, as four views of the same memory."""

    key_slots: torch.Tensor
    """[slots, H * D]: a key for each token slot. Two dimensions: indexing rows is fast then."""
    value_slots: torch.Tensor
    """[slots, H * D]."""
    key_pages: torch.Tensor
    """[page rows, page_size * H * D]."""
    value_pages: torch.Tensor
    """[page rows, page_size * H * D]."""


class Span(NamedTuple):
    """One sequence's part of a packed batch."""

    past: int
    """Its tokens that are already in the cache."""
    num_queries: int
    """Its tokens that this batch computes."""
    pages: Sequence[int]
    """Ids of its pages, in order."""
    key: str = ""
    """Unique among the running sequences; used with a `DecodeCache`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Sequences that attend in one call, padded to the longest of them."""

    rows: torch.Tensor
    """[B, Q] int64: the packed row of each query; the sequence's first one where padded."""
    real: torch.Tensor | None
    """[n] int64: which of the B * Q queries are not padding; None: all."""
    targets: torch.Tensor
    """[n] int64: the packed rows of the queries that are not padding."""
    pages: torch.Tensor
    """[B * P] int64: page rows to read; any row where padded."""
    mask: torch.Tensor | None
    """[B, 1, Q, K] bool: True where a query may look at a key. None: nothing is in the cache yet,
    so the chunk's own keys are read, causally."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The layout of a packed batch, for the attention of every layer. Built once a step."""

    positions: torch.Tensor
    """[T] int64: each token's index in its sequence."""
    slots: torch.Tensor
    """[T] int64: the slot of each token's key and value."""
    chunks: tuple[Chunk, ...]
    layer_pages: Callable[[int], LayerPages]
    """From a layer's index to its share of the cache."""
    decode: tuple[DecodeRows, ...] = ()
    """Sequences that are in no chunk, because their keys and values are contiguous."""
    reader: "PageReader | None" = None
    """Reads the pages of all sequences in place; there are no chunks then."""


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How the cache numbers its memory."""

    page_size: int
    """Tokens of a page."""
    rows_per_page_id: int
    """Distance in page rows between page id n and n + 1."""
    layer_pages: Callable[[int], LayerPages]


def plan_batch(
    spans: Sequence[Span],
    geometry: PageGeometry,
    *,
    device: torch.device,
    decode_cache: DecodeCache | None = None,
    kernel: "PagedKernel | None" = None,
) -> PagedBatch:
    """Return the layout of sequences that are packed in the order of `spans`.

    Args:
        spans: The sequences.
        geometry: The cache.
        device: Where the model is.
        decode_cache: Holds the sequences that have one query; None: they read their pages.
        kernel: Reads pages in place; None: they are copied.
    """
    past = np.fromiter((span.past for span in spans), np.int64, len(spans))
    counts = np.fromiter((span.num_queries for span in spans), np.int64, len(spans))
    starts = np.cumsum(counts) - counts
    table = _page_table([span.pages for span in spans]) * geometry.rows_per_page_id
    owner = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(len(owner)) - np.repeat(starts - past, counts)
    page, offset = np.divmod(positions, geometry.page_size)
    slots = table[owner, page] * geometry.page_size + offset
    if kernel is not None:
        return PagedBatch(
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            chunks=(),
            layer_pages=geometry.layer_pages,
            reader=kernel.plan(past, counts, table, geometry.page_size, device),
        )
    decodes = (counts == 1) & (past > 0) & (decode_cache is not None)
    # Sequences without a past read no pages, so they are not in a chunk with others.
    kinds = (~decodes & (past == 0), ~decodes & (past > 0))
    chunks = [
        _plan_chunk(starts[m], past[m], counts[m], table[m], geometry, device)
        for kind in kinds
        for m in _split(past, counts, np.flatnonzero(kind))
    ]
    decode: tuple[DecodeRows, ...] = ()
    if decode_cache is not None:
        decode = decode_cache.plan(
            Member(
                key=spans[i].key,
                row=int(starts[i]),
                past=int(past[i]),
                page_rows=table[i, : -(-int(past[i]) // geometry.page_size)].tolist(),
            )
            for i in np.flatnonzero(decodes).tolist()
        )
    return PagedBatch(
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        chunks=tuple(chunks),
        layer_pages=geometry.layer_pages,
        decode=decode,
    )


def _page_table(pages: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return page ids, [S, P], padded with 0."""
    lengths = np.fromiter(map(len, pages), np.int64, len(pages))
    table = np.zeros((len(pages), lengths.max()), np.int64)
    filled = np.arange(table.shape[1]) < lengths[:, None]
    table[filled] = np.fromiter(chain.from_iterable(pages), np.int64, lengths.sum())
    return table


def _split(
    past: NDArray[np.int64], counts: NDArray[np.int64], members: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Group sequences of similar shape, to limit padding and the size of masks."""
    totals = past + counts
    order = members[np.lexsort((totals[members], counts[members]))]
    shapes = zip(counts[order].tolist(), totals[order].tolist(), strict=True)
    begin, least, longest = 0, (0, 0), 0
    for end, (count, total) in enumerate(shapes):
        longest = max(longest, total)
        is_alike = count <= MAX_PADDING * least[0] and total <= MAX_PADDING * least[1]
        if is_alike and (end + 1 - begin) * count * longest <= MAX_MASK_ELEMENTS:
            continue
        if end > begin:
            yield order[begin:end]
        begin, least, longest = end, (count, total), total
    if len(order):
        yield order[begin:]


def _plan_chunk(
    starts: NDArray[np.int64],
    past: NDArray[np.int64],
    counts: NDArray[np.int64],
    table: NDArray[np.int64],
    geometry: PageGeometry,
    device: torch.device,
) -> Chunk:
    num_pages = -(-int((past + counts).max()) // geometry.page_size)
    steps = np.arange(counts.max())
    is_real = steps < counts[:, None]
    # A padded query repeats its sequence's first one: it sees a key, so its softmax is finite.
    offsets = np.where(is_real, steps, 0)
    rows = starts[:, None] + offsets
    seen = past[:, None] + offsets
    mask = None
    if past.any():
        mask = np.arange(num_pages * geometry.page_size) <= seen[:, None, :, None]

    def move(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Chunk(
        rows=move(rows),
        real=None if is_real.all() else move(np.flatnonzero(is_real)),
        targets=move(rows[is_real]),
        pages=move(np.ascontiguousarray(table[:, :num_pages]).reshape(-1)),
        mask=None if mask is None else move(mask),
    )


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: PagedBatch,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the batch's keys and values to the cache and attend, each sequence to its own pages.

    The signature is that of `transformers.AttentionInterface`.

    Args:
        module: The attention layer; its `layer_idx` finds its pages.
        query: [1, heads, T, D].
        key: [1, H, T, D].
        value: [1, H, T, D].
        attention_mask: Not used: `paged_batch` has the masks.
        paged_batch: The batch's layout.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        softcap: Refused: not supported.
        s_aux: Refused: not supported.

    Returns:
        [1, T, heads, D], and None for the weights.

    Raises:
        NotImplementedError: For attention with soft-capped scores or sinks.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            "paged attention has no soft-capping and no attention sinks; choose attention='eager'"
        )
    layer = paged_batch.layer_pages(module.layer_idx)  # pyright: ignore[reportArgumentType]
    layer.key_slots.index_copy_(0, paged_batch.slots, key[0].transpose(0, 1).flatten(1))
    layer.value_slots.index_copy_(0, paged_batch.slots, value[0].transpose(0, 1).flatten(1))
    packed = query[0].transpose(0, 1)
    if paged_batch.reader is not None:
        read = paged_batch.reader.read(
            packed, layer.key_pages, layer.value_pages, key.shape[1], scaling
        )
        return read.unsqueeze(0), None
    output = torch.empty(packed.shape, dtype=query.dtype, device=query.device)
    for chunk in paged_batch.chunks:
        attended = _attend(packed, key, value, layer, chunk, scaling).flatten(0, 1)
        real = attended if chunk.real is None else attended[chunk.real]
        output.index_copy_(0, chunk.targets, real)
    for rows in paged_batch.decode:
        keys, values = rows.append(
            module.layer_idx,  # pyright: ignore[reportArgumentType]
            key,
            value,
            (layer.key_pages, layer.value_pages),
        )
        output.index_copy_(0, rows.rows, _attend_one(packed, keys, values, rows, scaling))
    return output.unsqueeze(0), None


def _attend(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    chunk: Chunk,
    scaling: float | None,
) -> torch.Tensor:
    """[T, heads, D] -> [B, Q, heads, D] for the chunk's queries."""
    num_sequences, key_heads = chunk.rows.shape[0], key.shape[1]

    def read(new: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        if chunk.mask is None:
            return new[0][:, chunk.rows].transpose(0, 1)
        rows = pages.index_select(0, chunk.pages)
        return rows.view(num_sequences, -1, key_heads, packed.shape[2]).transpose(1, 2)

    attended = scaled_dot_product_attention(
        packed[chunk.rows].transpose(1, 2),
        read(key, layer.key_pages),
        read(value, layer.value_pages),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=packed.shape[1] != key_heads,
    )
    return attended.transpose(1, 2)


def _attend_one(
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: DecodeRows,
    scaling: float | None,
) -> torch.Tensor:
    """Attend with one query of each sequence: [T, heads, D] -> [B, heads, D].

    Heads that share keys are as many queries, so that the keys are read once.
    """
    query = packed.index_select(0, rows.rows)
    attended = scaled_dot_product_attention(
        query.unflatten(1, (keys.shape[1], -1)), keys, values, attn_mask=rows.bias, scale=scaling
    )
    return attended.flatten(1, 2)


def register_paged_attention() -> str:
    """Register the function in transformers, and return its name."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME


class CacheAccess:
    """Reads and clears the library's cache: page tables, page numbering, memory.

    Since 5.18 all layers share one tensor, in which a page id is a block of pages. Before, each
    layer has its own tensor, and a page id is a page.
    """

    def __init__(self, cache: Any, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._layers: dict[int, LayerPages] = {}
        self._has_allocators = hasattr(cache, "cache_allocators")

    @property
    def is_zeroed(self) -> bool:
        """Whether the library allocates zeros; `erase` would touch all of that memory."""
        return self._has_allocators

    @property
    def _allocator(self) -> Any:
        if self._has_allocators:
            return next(iter(self._cache.cache_allocators.values()))
        return self._cache.group_cache_managers[0]

    @property
    def page_tables(self) -> dict[str, list[int]]:
        """The page ids of each sequence in the cache."""
        return self._allocator.block_table

    @property
    def geometry(self) -> PageGeometry:
        """The layout of page ids in memory."""
        rows_per_page_id = 1
        if self._has_allocators:
            rows_per_page_id = self._allocator.block_physical_stride // self._page_size
        return PageGeometry(self._page_size, rows_per_page_id, self._layer_pages)

    def _layer_pages(self, layer: int) -> LayerPages:
        if layer not in self._layers:
            if self._has_allocators:
                slots = self._allocator._kv_token_views[layer]
            else:
                _, index = self._cache.layer_index_to_group_indices[layer]
                slots = (self._cache.key_cache[index], self._cache.value_cache[index])
            keys, values = (view.flatten(1) for view in slots)
            pages = (view.view(-1, self._page_size * view.shape[1]) for view in (keys, values))
            self._layers[layer] = LayerPages(keys, values, *pages)
        return self._layers[layer]

    def clear(self) -> None:
        """Drop every cached prefix; no sequence may use pages."""
        if self._has_allocators:
            self._cache.reset()
        else:
            manager = self._cache._block_manager
            self._cache._block_manager = type(manager)(
                manager.num_blocks, manager.block_size, tp_on=manager.tp_on
            )

    def erase(self) -> None:
        """Set the memory to zero. Masked values are multiplied by zero, which keeps NaN."""
        if self._has_allocators:
            self._cache.cache_tensor.zero_()
        else:
            for tensor in (*self._cache.key_cache, *self._cache.value_cache):
                tensor.zero_()
