"""Decode images and videos: from files, bytes, data URLs, and objects that users pass.

An image may be given as

- a path, or a `file://` URL; a relative path counts from the working directory;
- bytes of a PNG, JPEG, WebP, ... file, or `{"bytes": ..., "path": ...}` as Hugging Face writes it;
- a `data:image/...;base64,` URL, also within OpenAI's `{"image_url": {"url": ...}}`;
- MCP's `{"data": base64, "mimeType": ...}`, or `{"image": one of these}`;
- a `PIL.Image.Image`, or an array `[H, W, 3]` of uint8.

A video may be given as a path, as a list of frames (each an image), as an array `[F, H, W, 3]`, or
as `{"video": one of these, "fps": ..., "max_frames": ...}`. Nothing is fetched from a network.
"""

import asyncio
import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlparse
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image, ImageOps

from agentrl.errors import DataError, MissingExtraError
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaItem, MediaKind, Video
from agentrl.plugins.environment import install_command

MAX_PIXELS = 64 * 2**20
"""Most pixels of an image. A small file can describe a picture that fills the memory."""
MAX_VIDEO_PIXELS = 512 * 2**20
"""Most pixels of all frames of a video together."""
VIDEO_FPS = 2.0
"""Frames per second that are read from a video file, if its entry has no `fps`."""
MAX_FRAMES = 128
"""Most frames that are read from a video file, if its entry has no `max_frames`."""

_decoded: "WeakValueDictionary[bytes, Image.Image]" = WeakValueDictionary()
"""Decoded images by the digest of their file, while requests keep them: the samples of a group have
the same file, and some start later than others."""
_IMAGE = "a path, bytes of an image file, a data: URL, a PIL image or an array [H, W, 3] of uint8"
_VIDEO = "a path, a list of images, or an array [F, H, W, 3] of uint8"


def load_media(kind: MediaKind, source: Any) -> LoadedMedia:
    """Decode an image or a video, on the caller's thread.

    Args:
        kind: What `source` is.
        source: As the module's docstring lists.

    Raises:
        DataError: For a missing, broken or too large file, or another object.
        MissingExtraError: If a video file is given, and the package that reads it is missing.
    """
    if kind is MediaKind.IMAGE:
        image, name = _load_image(source)
        return LoadedMedia(kind, image, _digest(image.size, image.tobytes()), name)
    video, name = _load_video(source)
    shape = (*video.frames.shape, video.fps)
    return LoadedMedia(kind, video, _digest(shape, video.frames.tobytes()), name)


class MediaLoader:
    """Decodes and processes images and videos on threads, each of them once at a time.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: MediaProcessor) -> None:
        self._processor = processor
        self._running: dict[tuple[MediaKind, int], asyncio.Future[MediaItem]] = {}

    async def load(self, kind: MediaKind, source: Any) -> MediaItem:
        """Return the item of a source. Callers with the same object share the work.

        Raises:
            DataError: If it cannot be decoded, or the processor refuses it.
        """
        key = (kind, id(source))
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(asyncio.to_thread(self.load_now, kind, source))
            self._running[key] = task
            # The source is alive until then: the thread has it.
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    def load_now(self, kind: MediaKind, source: Any) -> MediaItem:
        """Do the same on the caller's thread."""
        return self._processor.process(load_media(kind, source))


def digest_sources(media: Mapping[str, Sequence[Any]]) -> str:
    """Hash images and videos without decoding them; empty if there are none.

    A file counts by its path.
    """
    if not any(media.values()):
        return ""
    digest = blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key, one in sorted(cast("Mapping[str, Any]", value).items()):
                digest.update(f"{key}:".encode())
                add(one)
        elif isinstance(value, bytes | bytearray):
            digest.update(value)
        elif isinstance(value, Image.Image | np.ndarray):
            pixels: np.ndarray[Any, Any] = np.asarray(value)
            digest.update(f"{pixels.shape} {pixels.dtype}".encode() + pixels.tobytes())
        elif isinstance(value, list | tuple):
            for one in cast("Sequence[Any]", value):
                add(one)
        else:
            digest.update(repr(value).encode())

    add(media)
    return digest.hexdigest()


def _load_image(source: Any) -> tuple[Image.Image, str]:
    """Return an image in RGB, and the name of its file if it has one."""
    found, name = source, ""
    if isinstance(found, Mapping):
        return _load_image(_unwrap(cast("Mapping[str, Any]", found), "image"))
    if isinstance(found, str):
        found, name = _read_text(found, "image")
    if isinstance(found, bytes | bytearray | memoryview):
        return _decode_image(bytes(found), name), name
    if isinstance(found, np.ndarray):
        found = _from_array(cast("np.ndarray[Any, Any]", found))
    if isinstance(found, Image.Image):
        _check_size(found, name)
        return _to_rgb(found), name
    raise DataError(f"{_shown(source)} is not an image", expected=_IMAGE)


def _unwrap(source: Mapping[str, Any], kind: str) -> Any:
    """Return what a mapping holds."""
    for key in ("bytes", kind, f"{kind}_url", "url", "path"):
        if source.get(key) is not None:
            return source[key]
    if isinstance(source.get("data"), str):
        return _decode_base64(source["data"])
    keys = ", ".join(map(repr, source)) or "no key"
    raise DataError(
        f"a mapping with {keys} is not an {kind}", expected=f"`bytes`, `path` or `{kind}`"
    )


def _read_text(text: str, kind: str) -> tuple[bytes, str]:
    """Return the bytes that a path or URL names, and the path."""
    if text.startswith("data:"):
        header, _, encoded = text.partition(",")
        if not header.endswith(";base64"):
            raise DataError(f"a data URL that begins with {header[:60]!r}", expected="base64")
        return _decode_base64(encoded), ""
    url = urlparse(text)
    if url.scheme in ("http", "https", "s3", "gs", "ftp"):
        raise DataError(
            f"the {kind} {text[:200]!r} is on a network, from which nothing is fetched",
            expected="a local file; download it first",
        )
    path = Path(unquote(url.path) if url.scheme == "file" else text).expanduser()
    try:
        return path.read_bytes(), str(path)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"the {kind} cannot be read: {reason}", file=path, expected="a file that exists"
        ) from None


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"not base64: {error}", expected="the bytes of a file as base64") from None


def _decode_image(data: bytes, name: str) -> Image.Image:
    if not data:
        raise DataError("an empty image file", file=name or None, expected=_IMAGE)
    key = blake2b(data, digest_size=16).digest()
    if (known := _decoded.get(key)) is not None:
        return known
    try:
        with Image.open(io.BytesIO(data)) as opened:
            _check_size(opened, name)
            return _decoded.setdefault(key, _to_rgb(opened))
    # PIL raises many kinds of errors for broken files: SyntaxError, struct.error, zlib.error, ...
    except Exception as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the image cannot be decoded: {error}", file=name or None, expected=_IMAGE
        ) from error


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise DataError(
            f"an image of {width} x {height} pixels",
            file=name or None,
            expected=f"1 to {MAX_PIXELS} pixels",
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return a copy in RGB, turned as its EXIF orientation says, with white behind it."""
    turned = ImageOps.exif_transpose(image)
    if turned.mode == "RGB":
        return turned.copy()
    if "A" in turned.getbands() or "transparency" in turned.info:
        layer = turned.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return turned.convert("RGB")


def _from_array(array: "np.ndarray[Any, Any]") -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise DataError(
            f"an array of shape {list(array.shape)} and type {array.dtype} is not an image",
            expected="an array [H, W, 3] of uint8",
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _load_video(source: Any) -> tuple[Video, str]:
    fps, max_frames, found = cast("float | None", None), MAX_FRAMES, source
    if isinstance(found, Mapping):
        given = cast("Mapping[str, Any]", found)
        fps, max_frames = _number(given, "fps"), int(_number(given, "max_frames") or MAX_FRAMES)
        found = _unwrap(given, "video")
    if isinstance(found, Video):
        return found, ""
    if isinstance(found, str):
        name = unquote(urlparse(found).path) if found.startswith("file:") else found
        path = Path(name).expanduser()
        return _read_video(path, fps or VIDEO_FPS, max_frames), str(path)
    if isinstance(found, np.ndarray):
        frames = cast("np.ndarray[Any, Any]", found)
        if frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[3] == 3 and len(frames):
            return Video(frames, fps), ""
    elif isinstance(found, Sequence) and not isinstance(found, bytes) and len(found):
        images = [_load_image(one)[0] for one in cast("Sequence[Any]", found)]
        if len({image.size for image in images}) > 1:
            raise DataError("the frames of a video have different sizes", expected="one size")
        return Video(np.stack([np.asarray(image) for image in images]), fps), ""
    raise DataError(f"{_shown(source)} is not a video", expected=_VIDEO)


def _number(source: Mapping[str, Any], key: str) -> float | None:
    value = source.get(key)
    if value is None or (isinstance(value, int | float) and 0 < value < float("inf")):
        return None if value is None else float(value)
    raise DataError(f"a video with the {key} {value!r}", expected="a number above 0")


def _read_video(path: Path, fps: float, max_frames: int) -> Video:
    """Read frames of a video file at equal distances in time."""
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            f"the video file {path} is read by the package av, which is not installed",
            install=install_command("video"),
        ) from error
    if not path.is_file():
        raise DataError("the video cannot be read: no such file", file=path)
    frames, next_time = list[Any](), 0.0
    try:
        with av.open(str(path)) as container:
            if container.duration:  # in microseconds: fewer frames of a long video
                fps = min(fps, max_frames / (container.duration / 1e6))
            for frame in container.decode(video=0):
                if frame.time is not None and frame.time < next_time - 1e-6:
                    continue
                next_time += 1 / fps
                frames.append(frame.to_ndarray(format="rgb24"))
                if sum(one.size for one in frames) > 3 * MAX_VIDEO_PIXELS:
                    raise DataError("a video that is too large", file=path)
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the video cannot be decoded: {error}", file=path) from error
    if not frames:
        raise DataError("a video without frames", file=path)
    if len(frames) > max_frames:
        chosen = np.linspace(0, len(frames) - 1, max_frames).round().astype(int)
        fps *= max_frames / len(frames)
        frames = [frames[index] for index in chosen]
    return Video(np.stack(frames), fps)


def _digest(shape: tuple[Any, ...], data: bytes) -> str:
    digest = blake2b(repr(shape).encode(), digest_size=16)
    digest.update(data)
    return digest.hexdigest()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
