"""A model's processor: what an image or a video becomes, in text, positions and tower inputs.

Any processor of transformers that declares `image_token` (or `video_token`) and returns the text
that replaces it can be used: the Qwen2-VL, Qwen2.5-VL and Qwen3-VL families, and others.
"""

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from agentrl.errors import DataError, MissingExtraError
from agentrl.media.positions import has_mrope
from agentrl.media.records import LoadedMedia, MediaItem, MediaKind, Video, find_item

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

MAX_CACHED_INPUT_BYTES = 512 * 2**20
"""Bytes of tower inputs that a process keeps; others are computed again from their pictures."""

TowerInputs = dict[str, NDArray[Any]]
"""Inputs of a vision tower by name, such as `pixel_values` and `image_grid_thw`."""

_cache: "LRUCache[tuple[str, str], TowerInputs]" = LRUCache(
    MAX_CACHED_INPUT_BYTES, getsizeof=lambda inputs: sum(value.nbytes for value in inputs.values())
)
_cache_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class MediaEncoder:
    """Computes the inputs of the vision tower. It is small, and can be sent to other processes."""

    processor: "ProcessorMixin" = field(repr=False)
    """A processor of transformers, without its tokenizer, which its `repr` would print."""
    kwargs: Mapping[str, Any]
    """`data.mm_processor_kwargs`."""
    key: str
    """Digest of the processor's settings."""

    @classmethod
    def of(cls, processor: "ProcessorMixin", kwargs: Mapping[str, Any]) -> "MediaEncoder":
        """Make the encoder of a processor, which is not changed."""
        light = copy.copy(processor)
        del light.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        settings = f"{type(processor).__name__} {light.to_dict()} {dict(kwargs)}"
        return cls(light, dict(kwargs), blake2b(settings.encode(), digest_size=16).hexdigest())

    def encode(self, loaded: LoadedMedia) -> TowerInputs:
        """Return the inputs of one item; cached for the process."""
        key = (self.key, loaded.digest)
        with _cache_lock:
            found = _cache.get(key)
        if found is None:
            found = self.keep(loaded, call_processor(self.processor, loaded, self.kwargs))
        return found

    def keep(self, loaded: LoadedMedia, inputs: TowerInputs) -> TowerInputs:
        """Put the inputs of an item into the cache of the process, if they fit; return them."""
        size = sum(value.nbytes for value in inputs.values())
        with _cache_lock:
            if size <= _cache.maxsize:
                _cache[(self.key, loaded.digest)] = inputs
        return inputs


class MediaProcessor:
    """A model's processor.

    Args:
        processor: The processor of transformers, with its tokenizer.
        config: The model's configuration; it says which positions its tokens have.
        kwargs: Further arguments of each call of the processor (`data.mm_processor_kwargs`).

    Attributes:
        placeholders: The text that a chat template writes for each kind of item.
        placeholder_ids: The tokens of these texts. They are sampled by no valid policy.
        has_mrope: Whether the model has three-dimensional positions.
    """

    def __init__(
        self,
        processor: "ProcessorMixin",
        config: "PretrainedConfig",
        *,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.processor = processor
        self.encoder = MediaEncoder.of(processor, kwargs or {})
        tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in MediaKind}
        self.placeholders: dict[MediaKind, str] = {kind: t for kind, t in tokens.items() if t}
        tokenizer: Any = processor.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self.placeholder_ids: dict[MediaKind, int] = {
            kind: tokenizer.convert_tokens_to_ids(token)
            for kind, token in self.placeholders.items()
        }
        self.has_mrope = has_mrope(config)
        self._vision: Any = getattr(config, "vision_config", None)

    def process(self, loaded: LoadedMedia) -> MediaItem:
        """Process an item, on the caller's thread; equal items give the same object.

        Raises:
            DataError: If the processor refuses it, or the model has no such input.
        """
        found = find_item(self.encoder.key, loaded.digest)
        return self._process(loaded).shared() if found is None else found

    def _process(self, loaded: LoadedMedia) -> MediaItem:
        kind = loaded.kind
        if kind not in self.placeholders:
            raise DataError(
                f"{type(self.processor).__name__} reads no {kind}s",
                file=loaded.source,
                expected=", ".join(f"{known}s" for known in self.placeholders) or "no media",
            )
        if kind is MediaKind.VIDEO and getattr(self.processor, "video_processor", None) is None:
            raise MissingExtraError(
                "processors of videos in transformers need the package torchvision, which is not "
                "installed",
                install="a torchvision that fits the installed torch",
            )
        placeholder = self.placeholders[kind]
        inputs = call_processor(
            self.processor, loaded, self.encoder.kwargs, text=[placeholder],
            return_text_replacement_offsets=True,
        )  # fmt: skip
        ids = np.asarray(inputs.pop("input_ids")).reshape(-1)
        ((replaced,),) = inputs.pop("text_replacement_offsets")
        for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
            inputs.pop(name, None)
        self.encoder.keep(loaded, inputs)
        runs = _run_lengths(ids == self.placeholder_ids[kind])
        if not runs or len(set(runs)) > 1:
            raise DataError(
                f"{type(self.processor).__name__} makes runs of {runs} tokens from one {kind}",
                file=loaded.source,
                expected="runs of one length",
            )
        positions, advance = self._positions(kind, inputs, runs)
        return MediaItem(
            loaded, replaced["replacement"], sum(runs), runs[0], positions, advance, self.encoder
        )

    def _positions(
        self, kind: MediaKind, inputs: TowerInputs, runs: list[int]
    ) -> tuple[NDArray[np.int64], int]:
        """Return the positions of the tokens of a run, counted from its start, and its advance."""
        if not self.has_mrope:
            plain = np.arange(runs[0])
            return np.broadcast_to(plain, (3, runs[0])), runs[0]
        merge: int = self._vision.spatial_merge_size
        time, height, width = (int(side) for side in np.asarray(inputs[f"{kind}_grid_thw"])[0])
        interval = 1.0
        if kind is MediaKind.VIDEO and "second_per_grid_ts" in inputs:
            seconds = float(np.asarray(inputs["second_per_grid_ts"]).reshape(-1)[0])
            interval = getattr(self._vision, "tokens_per_second", 1) * seconds
        time //= len(runs)  # a video with a run for each frame
        height, width = height // merge, width // merge
        grid = np.indices((time, height, width)).reshape(3, -1)
        grid[0] = (grid[0] * np.float32(interval)).astype(np.int64)
        return grid, max(height, width)


def call_processor(
    processor: "ProcessorMixin", loaded: LoadedMedia, kwargs: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Call a processor with one item, and return what it computes, as arrays.

    Raises:
        DataError: If it refuses the item.
    """
    given: dict[str, Any] = {f"{loaded.kind}s": [loaded.data]}
    if isinstance(loaded.data, Video):
        frames, fps = loaded.data.frames, loaded.data.fps
        metadata: dict[str, Any] = {"total_num_frames": len(frames), "fps": fps}
        metadata["frames_indices"] = list(range(len(frames)))
        given = {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
    try:
        return dict(processor(**given, **kwargs, **more, return_tensors="np"))  # pyright: ignore[reportCallIssue]
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise DataError(
            f"{type(processor).__name__} refuses this {loaded.kind}: {error}",
            file=loaded.source,
            expected="a picture or video that the model's processor supports; "
            "data.mm_processor_kwargs has its settings",
        ) from error


def _run_lengths(is_placeholder: NDArray[np.bool_]) -> list[int]:
    """Return the length of each run of placeholders."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_placeholder.astype(np.int8), [0]))))
    return (edges[1::2] - edges[::2]).tolist()
