"""Names and lines of rollout files, as plain text or compressed with zstd.

    rollouts/step_000010.jsonl        plain
    rollouts/step_000010.jsonl.zst    compressed: `zstdcat`, `pandas.read_json(path, lines=True)`

A compressed file is a sequence of zstd frames of about `_FRAME_BYTES` of text, so a line is read
again without the lines before its frame.
"""

import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import zstandard

from agentrl.errors import DataError

COMPRESSED = ".zst"
"""Ending of compressed files, after `.jsonl`."""
_NAME = re.compile(r"((step|val|val_.+)_(\d{6,}))(\.jsonl|\.jsonl\.zst|\.tokens\.parquet)")
_FRAME_BYTES = 1 << 19
_CHUNK_BYTES = 1 << 17


class RolloutFile(NamedTuple):
    """A file of rollouts, and what its name says."""

    path: Path
    label: str
    """The name without its ending: `step_000010`."""
    kind: str
    """`step` (training), `val` or `val_<set>`."""
    step: int


def rollout_path(folder: Path, step: int, kind: str = "step", *, compressed: bool = False) -> Path:
    """Name the file of one step's rollouts.

    Args:
        folder: The folder of the files.
        step: The run's step.
        kind: `step` (training), `val` or `val_<set>`.
        compressed: Whether the lines are compressed.

    Example:
        >>> rollout_path(Path("rollouts"), 10, "val").as_posix()
        'rollouts/val_000010.jsonl'
    """
    return folder / f"{kind}_{step:06d}.jsonl{COMPRESSED if compressed else ''}"


def other_form(path: Path) -> Path:
    """Name the same file of rollouts in the other form.

    Example:
        >>> other_form(Path("rollouts/step_000010.jsonl.zst")).name
        'step_000010.jsonl'
    """
    is_compressed = path.suffix == COMPRESSED
    return path.with_suffix("") if is_compressed else path.with_name(path.name + COMPRESSED)


def find_rollout_files(folder: Path, kind: str = "") -> list[RolloutFile]:
    """Find the files with rollouts of a folder, which may be missing, by name.

    Args:
        folder: The folder of the files.
        kind: `step`, `val` or `val_<set>`; empty for all.
    """
    found = _find_files(folder)
    return [one for one in found if one.path.suffix != ".parquet" and kind in ("", one.kind)]


def find_later_files(folder: Path, step: int) -> list[Path]:
    """Find the files of steps later than `step`, with those of tokens, by name."""
    return [one.path for one in _find_files(folder) if one.step > step]


def _find_files(folder: Path) -> list[RolloutFile]:
    found = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("*")))
    return [RolloutFile(path, match[1], match[2], int(match[3])) for path, match in found if match]


def write_lines(path: Path, lines: Iterable[str], *, compressed: bool = False) -> None:
    """Write lines, which end with a line break, to a file."""
    # UTF-8 cannot hold a lone surrogate; it becomes its JSON escape.
    encoded = (line.encode("utf-8", "backslashreplace") for line in lines)
    with path.open("wb") as file:
        if not compressed:
            file.writelines(encoded)
            return
        num_bytes = 0
        with zstandard.ZstdCompressor().stream_writer(file) as frames:
            for line in encoded:
                num_bytes += frames.write(line)
                if num_bytes >= _FRAME_BYTES:
                    frames.flush(zstandard.FLUSH_FRAME)
                    num_bytes = 0


@dataclass(frozen=True, slots=True)
class FrameStart:
    """Where a zstd frame begins."""

    offset: int
    """First byte of the text that is in the frame."""
    position: int
    """First byte of the frame in the file."""


class LineReader(io.BufferedReader):
    """Reads the text of a rollout file, in both forms, and notes where frames begin.

    Args:
        path: The file.
        start: A frame of the file, at which the text begins; None: at the start of the file.

    Raises:
        DataError: When a compressed file that is damaged is read.
    """

    def __init__(self, path: Path, start: FrameStart | None = None) -> None:
        file = path.open("rb", buffering=0)
        self.frames: list[FrameStart] = []
        """Frames that have been read; empty for a plain file."""
        if path.suffix == COMPRESSED:
            start = start or FrameStart(0, 0)
            file.seek(start.position)
            super().__init__(_FrameReader(file, start, self.frames), _CHUNK_BYTES)
        else:
            super().__init__(file, _CHUNK_BYTES)


def read_range(path: Path, offset: int, num_bytes: int, frames: Sequence[FrameStart]) -> bytes:
    """Read a part of the text of a rollout file.

    Args:
        path: The file.
        offset: First byte, in the text.
        num_bytes: Number of bytes.
        frames: The frames that a `LineReader` of the whole file found.
    """
    at = bisect_right(frames, offset, key=lambda frame: frame.offset) - 1
    start = frames[at] if frames else None
    with LineReader(path, start) as file:
        if start is None:
            file.seek(offset)
        else:
            file.read(offset - start.offset)
        return file.read(num_bytes)


class _FrameReader(io.RawIOBase):
    """The text of a file of zstd frames."""

    def __init__(self, file: IO[bytes], start: FrameStart, frames: list[FrameStart]) -> None:
        self._file = file
        self._position, self._offset = start.position, start.offset
        self._frames = frames
        self._frame: Any = None
        self._unread = b""
        """Bytes of the file after the last frame that was read."""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text and self._decompress():
            pass
        num = min(len(buffer), len(self._text))
        buffer[:num], self._text = self._text[:num], self._text[num:]
        self._offset += num
        return num

    def _decompress(self) -> bool:
        """Decompress the next bytes of the file; return whether there were any."""
        chunk = self._unread or self._file.read(_CHUNK_BYTES)
        if not chunk:
            if self._frame is not None:
                raise DataError("the file is damaged: its end is missing", file=self._file.name)
            return False
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._frames.append(FrameStart(self._offset, self._position))
        try:
            self._text = memoryview(self._frame.decompress(chunk))
        except zstandard.ZstdError as error:
            raise DataError(f"the file is damaged: {error}", file=self._file.name) from error
        self._unread = self._frame.unused_data
        self._position += len(chunk) - len(self._unread)
        if self._frame.eof:
            self._frame = None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
