"""Three-dimensional position ids (mrope), the only place where they are computed.

A token of text has three equal positions, one more than the token before it. The tokens of an image
have a grid of positions; the text after it continues at the largest side of the grid. So the
positions of any token follow from the last run of placeholders before it, and new tokens cost
nothing for earlier ones. A model without mrope gets plain positions: its items have `positions`
0, 1, 2, ... and an `advance` of their length.

Source: Wang et al. 2024, "Qwen2-VL", section 2.1, multimodal rotary position embedding.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentrl.media.records import MediaItem, MediaSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Run = tuple[int, int, MediaItem, int]
"""A run of placeholder tokens before it has a position: start, end, item, offset."""


def has_mrope(config: "PretrainedConfig") -> bool:
    """Whether a model has three-dimensional positions."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "mrope_section" in rope


def place_runs(
    earlier: Sequence[MediaSpan], runs: Iterable[Run], *, shift: int = 0
) -> list[MediaSpan]:
    """Give runs of new tokens their positions.

    Args:
        earlier: The spans of the sequence so far, in order.
        runs: The runs of the new tokens, in order.
        shift: Tokens of the sequence before those in which the runs count.
    """
    placed, last = list[MediaSpan](), earlier[-1] if earlier else None
    for start, end, item, offset in runs:
        start, end = start + shift, end + shift
        last = MediaSpan(start, end, item, offset, position_of(last, start))
        placed.append(last)
    return placed


def position_of(last: MediaSpan | None, index: int) -> int:
    """Return the position of the token `index`, of which `last` is the last run before it."""
    return index if last is None else last.next_position + index - last.end


def compute_position_ids(spans: Sequence[MediaSpan], start: int, end: int) -> NDArray[np.int64]:
    """Return the position ids of the tokens `[start, end)` of a sequence.

    Args:
        spans: All runs of placeholder tokens of the sequence, in order.
        start: Index of the first token.
        end: Index after the last token.

    Returns:
        `[3, end - start]`: temporal, vertical, horizontal.
    """
    before = [span for span in spans if span.end <= start]
    last, at = (before[-1] if before else None), start
    parts = list[NDArray[np.int64]]()
    for span in spans[len(before) :]:
        if span.start >= end:
            break
        if at < span.start:
            parts.append(_text(position_of(last, at), span.start - at))
            at = span.start
        stop = min(span.end, end)
        parts.append(span.item.positions[:, at - span.start : stop - span.start] + span.position)
        last, at = span, stop
    if at < end:
        parts.append(_text(position_of(last, at), end - at))
    return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64)


def _text(first: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, first + count), (3, count))
