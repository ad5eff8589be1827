"""Paged attention against plain causal attention of each sequence alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engines.transformers import paged_attention
from agentrl.engines.transformers.paged_attention import (
    LayerPages,
    PageGeometry,
    Span,
    paged_attention_forward,
    plan_batch,
)

PAGE, HEADS, KEY_HEADS, DIM, NUM_PAGES = 4, 4, 2, 8, 256
LAYER = SimpleNamespace(layer_idx=0)
CPU = torch.device("cpu")

sequences = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8)


def make_cache(rows_per_id: int) -> tuple[LayerPages, PageGeometry]:
    # What was never written is not a number: reading it would show.
    memory = torch.full((2, NUM_PAGES * rows_per_id * PAGE, KEY_HEADS * DIM), 1e4)
    keys, values = memory
    layer = LayerPages(keys, values, keys.view(-1, PAGE * 16), values.view(-1, PAGE * 16))
    return layer, PageGeometry(PAGE, rows_per_id, lambda _: layer)


def deal_pages(lengths: list[int], seed: int) -> list[list[int]]:
    """Scattered pages for each sequence, none for two."""
    order = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()
    counts = [-(-length // PAGE) for length in lengths]
    return [[order.pop() for _ in range(count)] for count in counts]


def attend(
    spans: list[Span], geometry: PageGeometry, tensors: list[tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """Run a packed batch; `tensors` are q, k, v of each span, [tokens, heads, D]."""
    q, k, v = (
        torch.cat(parts).transpose(0, 1).unsqueeze(0) for parts in zip(*tensors, strict=True)
    )
    batch = plan_batch(spans, geometry, device=CPU)
    output, _ = paged_attention_forward(LAYER, q, k, v, None, paged_batch=batch)  # pyright: ignore
    return list(output[0].split([span.num_queries for span in spans]))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(sequences, st.integers(1, 3), st.integers(0, 100))
def test_each_sequence_attends_as_if_it_were_alone(
    shapes: list[tuple[int, int]], rows_per_id: int, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    _, geometry = make_cache(rows_per_id)
    totals = [past + count for past, count in shapes]
    pages = deal_pages(totals, seed)
    whole = [
        tuple(
            torch.randn(total, heads, DIM, generator=generator)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        for total in totals
    ]
    first = [(Span(0, past, p), t) for (past, _), p, t in zip(shapes, pages, whole, strict=True)]
    first = [(span, tuple(x[: span.num_queries] for x in t)) for span, t in first]
    first = [(span, t) for span, t in first if span.num_queries]
    if first:
        attend([span for span, _ in first], geometry, [t for _, t in first])
    spans = [Span(past, count, p) for (past, count), p in zip(shapes, pages, strict=True)]
    tails = [tuple(x[past:] for x in t) for (past, _), t in zip(shapes, whole, strict=True)]
    for output, (past, _), (q, k, v) in zip(
        attend(spans, geometry, tails), shapes, whole, strict=True
    ):
        torch.testing.assert_close(output, plain(q, k, v)[past:], atol=1e-5, rtol=1e-5)


def test_no_mask_is_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged_attention, "MAX_MASK_ELEMENTS", 2000)
    _, geometry = make_cache(1)
    pages = deal_pages([40] * 20, seed=0)
    batch = plan_batch([Span(1, 39, p) for p in pages], geometry, device=CPU)
    assert len(batch.chunks) == 20
    masks = [chunk.mask for chunk in batch.chunks]
    assert all(mask is not None and mask.numel() <= 2000 for mask in masks)


def test_sequences_that_begin_need_no_mask():
    _, geometry = make_cache(1)
    spans = [Span(past, 8, p) for past, p in zip([0, 4, 0], deal_pages([12] * 3, 0), strict=True)]
    begin, later = plan_batch(spans, geometry, device=CPU).chunks
    assert (begin.mask, begin.rows.shape) == (None, (2, 8))
    assert later.mask is not None


def test_short_and_long_sequences_are_not_padded_to_each_other():
    _, geometry = make_cache(1)
    pages = deal_pages([8, 9, 100], seed=0)
    spans = [Span(length - 1, 1, p) for length, p in zip([8, 9, 100], pages, strict=True)]
    batch = plan_batch(spans, geometry, device=CPU)
    assert sorted(chunk.rows.shape[0] for chunk in batch.chunks) == [1, 2]


def test_unsupported_attention_is_refused():
    _, geometry = make_cache(1)
    batch = plan_batch([Span(0, 1, [0])], geometry, device=CPU)
    q = torch.randn(1, HEADS, 1, DIM)
    k = torch.randn(1, KEY_HEADS, 1, DIM)
    with pytest.raises(NotImplementedError, match="soft-capping"):
        paged_attention_forward(LAYER, q, k, k, None, paged_batch=batch, softcap=1.0)  # pyright: ignore
