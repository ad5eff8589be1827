"""Pictures of saved rollouts: each is a file of its own, once, next to the rollout files.

    rollouts/media/3f2a....png              the picture as the model's processor got it
    rollouts/media/3f2a...._small.png       at most 256 pixels wide and high

A line of a rollout file names them where the request has the picture:

    {"path": "media/3f2a....png", "thumbnail": "media/3f2a...._small.png", "width": 640,
     "height": 480}

A video is an animated PNG, with `frames` and `fps` in its entry.
"""

import io
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from PIL import Image, ImageSequence
from rich.text import Text

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError
from agentrl.media.records import Video
from agentrl.rollout.records import to_plain

FOLDER = "media"
"""Subfolder of the rollout files."""
THUMBNAIL_SIZE = 256
"""Largest width and height of a thumbnail, in pixels."""
DRAWN_SIZE = 32
"""Largest width and height of a picture that is drawn in a terminal, in pixels."""
UPPER_HALF_BLOCK = "\N{UPPER HALF BLOCK}"
DEFAULT_FPS = 2.0
"""Frames per second at which a video of unknown speed is shown."""
_DAMAGED = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Errors of reading a damaged file."""
_NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{32}}(_small)?\.png")


def is_picture_name(value: Any) -> TypeGuard[str]:
    """Return whether a value of a line is a name that `PictureCollector` gives to a file.

    Example:
        >>> is_picture_name("media/../../secret.png")
        False
    """
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


class PictureCollector:
    """Replaces pictures in a line by the names of their files, and keeps what must be written.

    Attributes:
        new: The bytes of the files that were not collected before, by path relative to the rollout
            file.
    """

    def __init__(self) -> None:
        self.new: dict[str, bytes] = {}
        self._known: set[str] = set()

    def plain(self, value: Any) -> Any:
        """Convert a value that JSON cannot hold (the `fallback` of pydantic)."""
        if isinstance(value, Image.Image):
            return self._add([value])
        if isinstance(value, Video):
            frames = [Image.fromarray(frame) for frame in value.frames]
            return self._add(frames, fps=value.fps or DEFAULT_FPS)
        return to_plain(value)

    def take(self) -> dict[str, bytes]:
        """Return the new files, and forget their bytes."""
        taken, self.new = self.new, {}
        return taken

    def _add(self, frames: list[Image.Image], fps: float | None = None) -> dict[str, Any]:
        first, name = frames[0], f"{FOLDER}/{digest_picture(frames, fps)}"
        if name not in self._known:
            self._known.add(name)
            self.new[f"{name}.png"] = _encode(frames, fps)
            small = first.copy()
            small.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
            self.new[f"{name}_small.png"] = _encode([small], None)
        entry: dict[str, Any] = {"path": f"{name}.png", "thumbnail": f"{name}_small.png"}
        entry |= {"width": first.width, "height": first.height}
        return entry if fps is None else entry | {"frames": len(frames), "fps": fps}


def digest_picture(frames: Sequence[Image.Image], fps: float | None = None) -> str:
    """Compute the digest that names the file of an image, or of a video's frames."""
    first = frames[0]
    digest = blake2b(repr((first.mode, first.size, fps)).encode(), digest_size=16)
    for frame in frames:
        digest.update(frame.tobytes())
    return digest.hexdigest()


class ShownPicture(NamedTuple):
    """An image or a video of a transcript."""

    data: Any
    """A PIL image, a `Video`, or what `read_picture` returned for a file that is missing."""
    source: str = ""
    """The file that it was read from, if it was one."""

    def describe(self) -> str:
        """Describe it in one line: its size, and its file."""
        data, saved = self.data, ""
        if isinstance(data, Video):
            count, height, width, _ = data.frames.shape
            text = f"video {width} x {height}, {count} frames"
        elif isinstance(data, Image.Image):
            text, saved = f"image {data.width} x {data.height}", data.info.get("path", "")
        else:
            text = "image or video that is not there any more"
        return ", ".join(filter(None, (text, self.source or saved)))


def draw_picture(picture: Any) -> Text:
    """Draw an image, or the first frame of a `Video`, for a terminal with colors.

    Each character shows two pixels, one above the other. Nothing is drawn for another object.
    """
    if not isinstance(picture, Video | Image.Image):
        return Text()
    first = Image.fromarray(picture.frames[0]) if isinstance(picture, Video) else picture
    small = first.convert("RGB")
    small.thumbnail((DRAWN_SIZE, DRAWN_SIZE))
    pixels = np.asarray(small)
    drawn = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=False):
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            colors = (f"rgb({','.join(map(str, color))})" for color in (above, below))
            drawn.append(UPPER_HALF_BLOCK, style=" on ".join(colors))
        drawn.append("\n")
    return drawn


def read_picture(entry: Any, folder: Path) -> Any:
    """Return the image or `Video` that an entry of a line names; the entry if there is no file.

    Args:
        entry: A value of the request's `multi_modal_data`, as it was read.
        folder: The folder of the rollout file.

    Raises:
        DataError: If the file is damaged.
    """
    if not isinstance(entry, dict) or "thumbnail" not in entry:
        return entry
    path = folder / str(entry["path"])  # pyright: ignore[reportUnknownArgumentType]
    if not path.is_file():
        return entry  # pyright: ignore[reportUnknownVariableType]
    try:
        with Image.open(path) as image:
            frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
    except _DAMAGED as error:
        raise DataError(f"the picture cannot be read: {error}", file=path) from error
    if "frames" not in entry:
        frames[0].info["path"] = str(path)
        return frames[0]
    return Video(np.stack([np.asarray(frame) for frame in frames]), entry["fps"])


def write_pictures(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write collected files next to the rollout files in `folder`; those that exist stay.

    Raises:
        OSError: naming the file that cannot be written.
    """
    for name, content in files.items():
        path = folder / name
        if not path.exists():
            with atomic_file(path) as draft:
                draft.write_bytes(content)


def _encode(frames: list[Image.Image], fps: float | None) -> bytes:
    buffer = io.BytesIO()
    animation: dict[str, Any] = {}
    if fps is not None:
        animation = {"save_all": True, "append_images": frames[1:], "duration": 1000 / fps}
    frames[0].save(buffer, "PNG", **animation)
    return buffer.getvalue()
