"""The vision tower of a model in training: which weights it has, and the features of pictures.

The tower with its merger or projector is all of a model's body but the language model.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from cachetools import LRUCache
from torch import nn
from transformers import PreTrainedModel

from agentrl.engines.vision import (
    PlacedFeatures,
    VisionFeatures,
    compute_features,
    compute_no_features,
    group_items,
    has_vision,
    language_model,
)
from agentrl.errors import ConfigError
from agentrl.media.processor import MediaEncoder
from agentrl.media.records import MediaItem, MediaSpan

if TYPE_CHECKING:
    from agentrl.workers.distributed import World

MAX_FEATURE_BYTES = 2**30
"""Bytes of features in host memory that a frozen tower keeps for later passes over a batch."""

Features = dict[tuple[str, str], VisionFeatures]
"""The features of items by their keys."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """Placeholder tokens of an item that follow each other among packed tokens."""

    item: MediaItem
    start: int
    """Packed position of the first token."""
    first: int
    """Index of the first token's feature among those of the item."""
    last: int
    """Index after the last token's feature."""


def place_media(
    spans: Sequence[MediaSpan], start: int, end: int, offset: int
) -> Iterator[PlacedMedia]:
    """Locate the runs of placeholders of a row among packed tokens.

    Args:
        spans: The runs of the row, in order.
        start: Index in the row of the first token that is packed.
        end: Index after the last one.
        offset: Packed position of the first one.
    """
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            shift = span.offset - span.start
            yield PlacedMedia(span.item, offset + first - start, first + shift, last + shift)


def tower_weights(lm: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """List the weights of a model's vision tower with its merger, by name; empty without one.

    Adapters of LoRA are not among them.

    Raises:
        ConfigError: if the model has no interface of a tower and a language model.
    """
    if not has_vision(lm.config):
        return []
    body = lm.base_model
    if not (hasattr(body, "language_model") and hasattr(body, "get_image_features")):
        raise ConfigError(
            f"{type(lm).__name__} has no separate vision tower and language model",
            key="model.path",
            expected="a model of transformers with get_image_features and language_model, such as "
            "Qwen2-VL, Qwen2.5-VL or Qwen3-VL",
        )
    others = {id(weight) for weight in language_model(lm).parameters()}
    head = lm.get_output_embeddings()
    others |= {id(weight) for weight in head.parameters()} if head is not None else set()
    return [(name, w) for name, w in lm.named_parameters() if id(w) not in others]


def freeze_tower(lm: PreTrainedModel) -> None:
    """Train only the language part of a model."""
    for _, weight in tower_weights(lm):
        weight.requires_grad_(False)


class VisionTower:
    """Computes the features of the pictures of packed micro-batches.

    The features of a frozen tower are kept for later passes over the same pictures: those of the
    log-probabilities before an update serve the update.

    Args:
        lm: The Hugging Face model.
        world: The ranks that shard it.
    """

    def __init__(self, lm: PreTrainedModel, world: "World") -> None:
        self._lm = lm
        self._world = world
        self._kept: LRUCache[tuple[str, str], VisionFeatures] = LRUCache(
            MAX_FEATURE_BYTES, getsizeof=lambda features: features.nbytes
        )

    @property
    def is_frozen(self) -> bool:
        """Whether no weight of the tower is trained."""
        return not any(weight.requires_grad for _, weight in tower_weights(self._lm))

    def place(
        self, media: Sequence[PlacedMedia], encoder: MediaEncoder | None
    ) -> PlacedFeatures | None:
        """Return the features of packed tokens; None if there is nothing to place.

        Args:
            media: The pictures among the packed tokens. Each is computed once.
            encoder: As of `PackedBatch`; if it is not None, this is a collective.
        """
        if not media and encoder is None:
            return None
        is_frozen = self.is_frozen
        with torch.no_grad() if is_frozen else nullcontext():
            wanted = {one.item.key: one.item for one in media}
            features = self._load(wanted) if is_frozen else {}
            missing = [item for key, item in wanted.items() if key not in features]
            computed = compute_features(self._lm, missing)
            idle = [] if encoder is None else self._take_part(missing, encoder)
        for item, found in zip(missing, computed, strict=True):
            features[item.key] = found
            if is_frozen and found.nbytes <= self._kept.maxsize:
                self._kept[item.key] = _to(found.clone(), torch.device("cpu"))
        parts = [(one.start, features[one.item.key].take(one.first, one.last)) for one in media]
        return PlacedFeatures.join([*parts, *((0, nothing) for nothing in idle)])

    def _load(self, wanted: dict[tuple[str, str], MediaItem]) -> Features:
        device = self._world.device
        return {key: _to(self._kept[key], device) for key in wanted if key in self._kept}

    def _take_part(
        self, computed: Sequence[MediaItem], encoder: MediaEncoder
    ) -> list[VisionFeatures]:
        """Call the tower as often as the rank with the most calls; a collective."""
        own = len(group_items(computed))
        most = int(self._world.max([own])[0])
        return [compute_no_features(self._lm, encoder) for _ in range(most - own)]


def _to(features: VisionFeatures, device: torch.device) -> VisionFeatures:
    layers = tuple(layer.to(device) for layer in features.deepstack)
    return VisionFeatures(features.embeds.to(device), layers)
