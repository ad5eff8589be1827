"""Pictures in the packed batch of a step: features of the scheduled tokens, and their positions."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.vision import PlacedFeatures, VisionFeatures, compute_features
from agentrl.media.positions import compute_position_ids, has_mrope, position_of
from agentrl.media.records import MediaItem, MediaSpan

MAX_FEATURE_BYTES = 512 * 2**20
"""Bytes of features that are kept for later steps; others are computed again when needed."""
MAX_NUMBERED_ITEMS = 65_536
"""Number of items whose prefixes can be shared; others are numbered again."""
MAX_PREFIX_ID = 2**31 - 1
"""The library hashes ids as signed integers of 32 bits."""
ANY_ID = 0
"""The token id where a feature replaces the embedding."""


class Scheduled(NamedTuple):
    """The tokens of one sequence that a step computes."""

    media: Sequence[MediaSpan]
    """All runs of placeholders of the sequence, in order."""
    past: int
    """Tokens before them."""
    row: int
    """Packed position of the first."""
    num_tokens: int

    def pieces(self) -> Iterator[tuple[int, MediaItem, int, int]]:
        """Yield parts of items: packed position, item, first feature, feature after the last."""
        if not self.media or self.past >= self.media[-1].end:
            return
        end = self.past + self.num_tokens
        for span in self.media:
            low, high = max(span.start, self.past), min(span.end, end)
            if low < high:
                first = span.offset + low - span.start
                yield self.row + low - self.past, span.item, first, first + high - low


class PrefixIds:
    """Numbers for the tokens of pictures, above the vocabulary.

    The library shares prefixes between sequences of equal ids, and all pictures have the same
    placeholder. So each picture gets a range of numbers, one for each of its tokens. After two
    billion tokens numbers are used again; by then the cache has lost the pages that had them.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = self._next = vocab_size
        self._first: LRUCache[tuple[str, str], int] = LRUCache(MAX_NUMBERED_ITEMS)

    def replace(self, input_ids: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
        """Return the ids with a number for each token of a picture."""
        ids = list(input_ids)
        for span in media:
            first = self._number(span.item) + span.offset
            ids[span.start : span.end] = range(first, first + span.end - span.start)
        return ids

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Return ids of the vocabulary: any where a picture's number is."""
        return [one if one < self._vocab_size else ANY_ID for one in ids]

    def _number(self, item: MediaItem) -> int:
        first = self._first.get(item.key)
        if first is None:
            if self._next + item.num_tokens > MAX_PREFIX_ID:
                self._first.clear()
                self._next = self._vocab_size
            first = self._first[item.key] = self._next
            self._next += item.num_tokens
        return first


class VisionInputs:
    """Features and positions for a vision-language model.

    The features of an item are kept, so that its tower runs once for all samples of a group and for
    all their turns. They are dropped with the prefix cache, because they depend on the weights.

    Attributes:
        prefix_ids: The numbers of the pictures' tokens.

    Args:
        lm: The engine's model.
        max_bytes: Limit of the features that are kept.
    """

    def __init__(self, lm: PreTrainedModel, *, max_bytes: int = MAX_FEATURE_BYTES) -> None:
        self._lm = lm
        self._has_mrope = has_mrope(lm.config)
        self.prefix_ids = PrefixIds(lm.config.get_text_config().vocab_size)
        self._kept: LRUCache[tuple[str, str], VisionFeatures] = LRUCache(
            max_bytes, getsizeof=lambda features: features.nbytes
        )

    def place_features(self, scheduled: Sequence[Scheduled]) -> PlacedFeatures | None:
        """Return the features of the scheduled tokens; None: all are text."""
        pieces = [piece for part in scheduled for piece in part.pieces()]
        features = self._load([item for _, item, _, _ in pieces])
        return PlacedFeatures.join(
            [(row, features[item.key].take(first, end)) for row, item, first, end in pieces]
        )

    def place_positions(self, scheduled: Sequence[Scheduled], index: Tensor) -> Tensor:
        """Return the position ids of the scheduled tokens.

        Args:
            scheduled: The sequences, in packed order.
            index: `[T]`, the index of each packed token in its sequence.

        Returns:
            `[1, T]`, or `[3, 1, T]` if the model has mrope and a sequence has media.
        """
        if not self._has_mrope or not any(part.media for part in scheduled):
            return index.unsqueeze(0)
        shifts = np.zeros((3, len(index)), np.int64)
        for part in scheduled:
            if part.media:
                shifts[:, part.row : part.row + part.num_tokens] = _shifts(part)
        return (index + torch.from_numpy(shifts).to(index.device)).unsqueeze(1)

    def clear(self) -> None:
        """Drop all features."""
        self._kept.clear()

    def _load(self, items: Sequence[MediaItem]) -> dict[tuple[str, str], VisionFeatures]:
        """Return the features of each item, by key; the tower runs on those that are not kept."""
        wanted = {item.key: item for item in items}
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        missing = {key: item for key, item in wanted.items() if key not in found}
        computed = compute_features(self._lm, list(missing.values()))
        for key, features in zip(missing, computed, strict=True):
            # A clone: a view would keep the features of all items of this step alive.
            found[key] = features.clone()
            if features.nbytes <= self._kept.maxsize:
                self._kept[key] = found[key]
        return found


def _shifts(part: Scheduled) -> Any:
    """Return the difference of position ids and indices: `[3, num_tokens]`, or a number."""
    last = part.media[-1]
    if part.past >= last.end:
        return position_of(last, part.past) - part.past
    end = part.past + part.num_tokens
    return compute_position_ids(part.media, part.past, end) - np.arange(part.past, end)
