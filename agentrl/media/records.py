"""The records of an image or a video, from its file to its tokens.

    bytes, path, PIL image -> LoadedMedia   decoded, once
    LoadedMedia            -> MediaItem     processed for a model: its text, its tokens' positions
    MediaItem              -> MediaSpan     where its tokens are in a sequence

Records are shared by reference: all samples of a group have the same items.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from agentrl.media.processor import MediaEncoder


class MediaKind(StrEnum):
    """What a media item is. The values are those of content parts and of `multi_modal_data`."""

    IMAGE = "image"
    VIDEO = "video"


class Video:
    """A decoded video.

    Not a tuple or a dataclass: pydantic would write those as their parts.

    Attributes:
        frames: `[F, H, W, 3]`, uint8, RGB.
        fps: Frames per second of `frames`; None: unknown.
    """

    __slots__ = ("fps", "frames")

    def __init__(self, frames: NDArray[np.uint8], fps: float | None) -> None:
        self.frames = frames
        self.fps = fps


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedMedia:
    """A decoded image or video."""

    kind: MediaKind
    data: Any
    """A `PIL.Image.Image` in RGB, or a `Video`."""
    digest: str
    """Hexadecimal digest of the decoded content: equal for equal pictures."""
    source: str = ""
    """The path or URL that it was read from; empty if it was given as bytes or as an object."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MediaItem:
    """An image or video as one model sees it."""

    loaded: LoadedMedia
    text: str
    """What replaces the placeholder that the chat template writes, before the text is encoded."""
    num_tokens: int
    """Number of placeholder tokens in `text`: one for each feature of the vision tower."""
    run_length: int
    """Placeholder tokens that follow each other without a text between them. A video may have
    several runs of this length, one for each frame."""
    positions: NDArray[np.int64]
    """`[3, run_length]`: temporal, vertical and horizontal position of each token of a run, counted
    from the position at which the run starts."""
    advance: int
    """How far the position after a run is from its start."""
    encoder: "MediaEncoder"
    """Computes the inputs of the vision tower."""

    @property
    def kind(self) -> MediaKind:
        """Image or video."""
        return self.loaded.kind

    @property
    def digest(self) -> str:
        """Digest of the decoded content."""
        return self.loaded.digest

    @property
    def key(self) -> tuple[str, str]:
        """Equal for equal pictures that are processed in the same way."""
        return self.encoder.key, self.loaded.digest

    def __deepcopy__(self, _: Any) -> "MediaItem":
        """Return the item itself: a copy of a message shows the same picture."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes; a process that has the item already keeps its own."""
        return _restore, tuple(getattr(self, one.name) for one in fields(self))

    def shared(self) -> "MediaItem":
        """Return the item of this process for the same picture: itself, or an earlier one."""
        return _items.setdefault((self.encoder.key, self.digest), self)

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the inputs of the vision tower by name, such as `pixel_values`.

        They are computed again if they are not in the cache of this process.
        """
        return self.encoder.encode(self.loaded)


_items: "WeakValueDictionary[tuple[str, str], MediaItem]" = WeakValueDictionary()
"""The items of this process by the processor's settings and the picture's digest. Requests keep
them; this finds the one of an equal picture."""


def find_item(encoder_key: str, digest: str) -> MediaItem | None:
    """Return the item of this process for a picture; None if there is none."""
    return _items.get((encoder_key, digest))


def _restore(*values: Any) -> MediaItem:
    return MediaItem(*values).shared()


class MediaSpan(NamedTuple):
    """A run of placeholder tokens in a sequence."""

    start: int
    """Index of the first token among the sequence's `input_ids`, prompt included."""
    end: int
    """Index after the last token."""
    item: MediaItem
    offset: int
    """Index of the feature of the first token among those of the item."""
    position: int
    """Position id at which the run starts."""

    @property
    def next_position(self) -> int:
        """Position id of the token after the run."""
        return self.position + self.item.advance
