"""Three-dimensional positions, compared with those of the models."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.media.positions import compute_position_ids, place_runs
from tests.fakes.vision_models import (
    FAMILIES,
    PLAIN_FAMILY,
    encode_with_media,
    encode_with_spans,
    load_parts,
    make_processor,
    model_positions,
)

TEXTS = st.text("abc \n", max_size=6)
PICTURES = st.tuples(st.integers(0, 3), st.sampled_from([(16, 16), (40, 16), (16, 64)]))
PARTS = st.lists(TEXTS | PICTURES, max_size=8)

processor_of = cache(make_processor)


def encode(family: str, parts: list[Any]) -> tuple[list[int], list[Any]]:
    return encode_with_spans(processor_of(family), ["x", *parts])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(parts=PARTS)
def test_positions_are_those_of_the_model(family: str, parts: list[Any]) -> None:
    ids, spans = encode(family, parts)
    expected = model_positions(family, ids, spans)
    assert np.array_equal(compute_position_ids(spans, 0, len(ids)), expected)


@given(parts=PARTS, data=st.data())
def test_the_positions_of_a_part_are_those_of_the_whole(parts: list[Any], data: Any) -> None:
    ids, spans = encode("qwen2_vl", parts)
    start = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(start, len(ids)))
    whole = compute_position_ids(spans, 0, len(ids))
    assert np.array_equal(compute_position_ids(spans, start, end), whole[:, start:end])


@given(parts=PARTS, later=PARTS)
def test_later_tokens_continue_from_the_last_picture(parts: list[Any], later: list[Any]) -> None:
    ids, spans = encode("qwen3_vl", parts)
    more, runs = encode_with_media(processor_of("qwen3_vl"), load_parts(later))
    appended = [*spans, *place_runs(spans, runs, shift=len(ids))]
    _, together = encode("qwen3_vl", [*parts, *later])
    assert [span[:2] + span[3:] for span in appended] == [span[:2] + span[3:] for span in together]
    assert len(more) + len(ids) >= (appended[-1].end if appended else 0)


@given(parts=PARTS)
def test_a_model_without_mrope_has_plain_positions(parts: list[Any]) -> None:
    ids, spans = encode(PLAIN_FAMILY, parts)
    plain = np.tile(np.arange(len(ids)), (3, 1))
    assert np.array_equal(compute_position_ids(spans, 0, len(ids)), plain)
