"""Sequences that decode attend to contiguous copies of their pages, as if each were alone."""

import pytest
import torch

from agentrl.engines.transformers.decode_cache import DecodeCache, Member, Table
from agentrl.engines.transformers.paged_attention import (
    Span,
    paged_attention_forward,
    plan_batch,
)
from tests.engines.transformers.test_paged_attention import (
    CPU,
    DIM,
    HEADS,
    KEY_HEADS,
    LAYER,
    PAGE,
    deal_pages,
    make_cache,
    plain,
)

NUM_STEPS = 40


def member(key: str, past: int, row: int = 0) -> Member:
    return Member(key=key, row=row, past=past, page_rows=[0])


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_come_and_go_attend_as_if_each_were_alone(seed: int):
    generator = torch.Generator().manual_seed(seed)
    _, geometry = make_cache(2)
    prompts = [3, 60, 9, 30, 1, 61, 44, 90, 12]
    pages = deal_pages([prompt + NUM_STEPS for prompt in prompts], seed)
    # Sequence i decodes in these steps; before, its prompt is computed.
    begins = [0, 0, 0, 5, 5, 9, 12, 12, 20]
    ends = [NUM_STEPS, 7, 30, 9, 31, NUM_STEPS, NUM_STEPS, 14, NUM_STEPS]
    whole = [
        [torch.randn(n + NUM_STEPS, heads, DIM, generator=generator) for heads in (4, 2, 2)]
        for n in prompts
    ]
    cache, done = DecodeCache(), [0] * len(prompts)
    for step in range(NUM_STEPS):
        active = [i for i in range(len(prompts)) if begins[i] <= step < ends[i]]
        spans = [Span(done[i], 1 if done[i] else prompts[i], pages[i], key=f"{i}") for i in active]
        parts = [
            [x[s.past : s.past + s.num_queries] for x in whole[i]]
            for i, s in zip(active, spans, strict=True)
        ]
        q, k, v = (torch.cat(p).transpose(0, 1)[None] for p in zip(*parts, strict=True))
        batch = plan_batch(spans, geometry, device=CPU, decode_cache=cache)
        output, _ = paged_attention_forward(LAYER, q, k, v, None, paged_batch=batch)  # pyright: ignore
        outputs = output[0].split([span.num_queries for span in spans])
        for i, span, actual in zip(active, spans, outputs, strict=True):
            done[i] = span.past + span.num_queries
            expected = plain(*(x[: done[i]] for x in whole[i]))[span.past :]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert (HEADS, KEY_HEADS, PAGE) == (4, 2, 4)


def test_pages_are_copied_when_a_sequence_joins_and_not_again():
    cache = DecodeCache()
    first = cache.plan([member("a", 10), member("b", 12)])
    second = cache.plan([member("a", 11), member("b", 13)])
    third = cache.plan([member("b", 14), member("c", 30)])
    fourth = cache.plan([member("b", 15)])  # moves to the row that c has left
    steps = (first, second, third, fourth)
    assert [len(rows.joined.slots) if rows.joined else 0 for (rows,) in steps] == [2, 0, 1, 1]


def test_a_sequence_that_was_computed_elsewhere_in_between_is_copied_again():
    cache = DecodeCache()
    cache.plan([member("a", 10)])
    (rows,) = cache.plan([member("a", 20)])
    assert rows.joined is not None


def test_lengths_that_differ_much_are_not_padded_to_each_other():
    cache = DecodeCache()
    rows = cache.plan([member("a", 10), member("b", 1000), member("c", 1100), member("d", 20)])
    assert [one.bias.shape[-1] for one in rows] == [21, 1001, 1101]


def test_memory_of_a_length_that_no_sequence_has_is_freed():
    cache = DecodeCache()
    cache.plan([member("a", 60)])
    (rows,) = cache.plan([member("a", 70)])
    assert rows.table.capacity == 96
    assert list(cache._tables) == [96]


def test_unused_memory_of_a_table_is_finite():
    layer = Table(64, num_rows=3).layer(0, torch.zeros(1, 2, 1, 8))
    assert all(not part.any() for part in layer)
