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


def tower_modules(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a model's vision tower and merger by name; none of a model of text.

    Raises:
        ConfigError: if the model has no interface of a tower and a language model.
    """
    if not has_vision(lm.config):
        return {}
    body = lm.base_model
    if not (hasattr(body, "language_model") and hasattr(body, "get_image_features")):
        raise ConfigError(
            f"{type(lm).__name__} has no separate vision tower and language model",
            key="model.path",
            expected="a model of transformers with get_image_features and language_model, such as "
            "Qwen2-VL, Qwen2.5-VL or Qwen3-VL",
        )
    parts = {part for part in body.children() if part is not language_model(lm)}
    inner = {module for part in parts for module in part.modules()}
    return {name: module for name, module in lm.named_modules() if module in inner}


def tower_weights(lm: PreTrainedModel) -> list[nn.Parameter]:
    """List the weights of a model's vision tower and merger; none of a model of text.

    Raises:
        ConfigError: as `tower_modules`.
    """
    return [w for module in tower_modules(lm).values() for w in module.parameters(recurse=False)]


def freeze_tower(lm: PreTrainedModel) -> None:
    """Train only the language part of a model."""
    for weight in tower_weights(lm):
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
        return not any(weight.requires_grad for weight in tower_weights(self._lm))

    def frozen_weights(self) -> list[nn.Parameter]:
        """List the weights of a tower that is not trained; none of a tower that is."""
        return tower_weights(self._lm) if self.is_frozen else []

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
            num_idle = 0 if encoder is None else self._count_idle_calls(missing)
            computed = compute_features(self._lm, missing)
            idle = [compute_no_features(self._lm, encoder) for _ in range(num_idle) if encoder]
        for item, found in zip(missing, computed, strict=True):
            features[item.key] = found
            if is_frozen and found.nbytes <= self._kept.maxsize:
                self._kept[item.key] = _to(found.clone(), torch.device("cpu"))
        parts = [(one.start, features[one.item.key].take(one.first, one.last)) for one in media]
        return PlacedFeatures.join([*parts, *((0, nothing) for nothing in idle)])

    def _load(self, wanted: dict[tuple[str, str], MediaItem]) -> Features:
        device = self._world.device
        return {key: _to(self._kept[key], device) for key in wanted if key in self._kept}

    def _count_idle_calls(self, missing: Sequence[MediaItem]) -> int:
        """Return how many calls this rank makes less than the one with the most; a collective."""
        own = len(group_items(missing))
        return int(self._world.max([own])[0]) - own


def _to(features: VisionFeatures, device: torch.device) -> VisionFeatures:
    layers = tuple(layer.to(device) for layer in features.deepstack)
    return VisionFeatures(features.embeds.to(device), layers)
