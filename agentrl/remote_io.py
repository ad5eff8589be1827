"""Files and folders at a URL of fsspec (`s3://`, `gs://`, `hdfs://`), complete or absent.

An object store cannot rename a folder, so a folder there counts as complete if it has its marker: a
file that is written last and removed first. fsspec and the package of the protocol are imported
when the first URL is used; they repeat requests that fail, each in its own way.
"""

import errno
import io
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from agentrl.atomic_io import atomic_file
from agentrl.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_DRAFT = ".draft"
_BUFFER_BYTES = 2**20
_MAX_REASON_CHARS = 300
_STORES_WITHOUT_FOLDERS = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "tos"}
)
"""Protocols whose paths begin with a bucket. Making a folder there could make a bucket."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or a folder of a store. It has the methods of `pathlib.Path` that readers need.

    Errors of the store are `StoreError`; a missing file is `FileNotFoundError`.

    Example:
        >>> step = RemotePath("s3://bucket/run") / "checkpoints" / "global_step_10"
        >>> step.name
        'global_step_10'
    """

    url: str
    """Without a slash at the end."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self.url.rpartition("/")[0])

    def is_file(self) -> bool:
        """Return whether there is a file."""
        fs, path = _connect(self)
        with naming_store(self, "read"):
            fs.invalidate_cache(fs._parent(path))
            return fs.isfile(path)

    def is_dir(self) -> bool:
        """Return whether there is a folder with files."""
        return bool(self._list())

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file of the folder by name; empty if there is no folder."""
        files = (entry for entry in self._list() if entry["type"] == "file")
        return {_last(entry["name"]): entry["size"] for entry in files}

    def folders(self) -> "list[RemotePath]":
        """List the folders in the folder; empty if there is none."""
        return [self / _last(e["name"]) for e in self._list() if e["type"] == "directory"]

    def _list(self) -> list[dict[str, Any]]:
        fs, path = _connect(self)
        with naming_store(self, "read"):
            fs.invalidate_cache(path)  # other processes write to the folder too
            try:
                return fs.ls(path, detail=True)
            except FileNotFoundError:
                return []

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file to read it; requests have at least a MiB.

        Raises:
            FileNotFoundError: if there is no file.
            StoreError: if the store cannot be read.
        """
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: use `create` to write")
        reader = io.BufferedReader(_RangeReader(self), _BUFFER_BYTES)
        return cast("BinaryIO", reader)

    @contextmanager
    def create(self) -> Iterator[BinaryIO]:
        """Open a file to write to it in pieces. On some stores it is visible before it is complete.

        Raises:
            StoreError: if the store does not take it.
        """
        fs, path = _connect(self)
        with naming_store(self, "write"):
            _make_parent(fs, path)
            with fs.open(path, "wb") as file:
                yield cast("BinaryIO", file)

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        fs, path = _connect(self)
        with naming_store(self, "read"):
            return cast("bytes", fs.cat_file(path))

    def write_bytes(self, content: bytes) -> None:
        """Write a small file, complete or absent.

        Raises:
            StoreError: if the store does not take it.
        """
        fs, path = _connect(self)
        with naming_store(self, "write"):
            _make_parent(fs, path)
            fs.pipe_file(path + _DRAFT, content)
            fs.mv(path + _DRAFT, path)

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files of the folder."""
        fs, path = _connect(self)
        with naming_store(self, "remove files of"):
            if names:
                fs.rm([f"{path}/{name}" for name in names])

    def remove_folder(self, marker: str) -> None:
        """Remove a folder, its marker first; nothing happens if there is none."""
        fs, path = _connect(self)
        with naming_store(self, "remove"):
            fs.invalidate_cache(path)
            if fs.exists(f"{path}/{marker}"):
                fs.rm_file(f"{path}/{marker}")
                fs.invalidate_cache(path)
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def move_folder(self, target: "RemotePath", marker: str) -> None:
        """Copy a folder and remove it, its marker first. The copy is complete before that."""
        fs, path = _connect(self)
        names = sorted(self.file_sizes(), key=lambda name: name == marker)
        with naming_store(self, "move"):
            for name in names:
                copy = f"{_connect(target)[1]}/{name}"
                _make_parent(fs, copy)
                fs.copy(f"{path}/{name}", copy)
        self.remove_folder(marker)


Location = Path | RemotePath
"""A file or a folder of this machine, or of a store."""


def locate(place: Path | str) -> Location:
    """Return the location that a key of a run file names: a path, or a URL."""
    return place if isinstance(place, Path) else RemotePath(place)


def write_whole(path: Location, content: bytes) -> None:
    """Write a small file, complete or absent; missing folders are made.

    Raises:
        OSError: if the disk does not take it.
        StoreError: if the store does not take it.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(content)
    else:
        with atomic_file(path) as draft:
            draft.write_bytes(content)


def upload_folder(folder: Path, target: RemotePath, *, marker: str) -> None:
    """Copy a folder to a store, its marker last. Files that the folder does not have are removed.

    Raises:
        StoreError: if the store does not take it; then the target has no marker.
    """
    target.remove_folder(marker)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for file in sorted(files, key=lambda file: file == folder / marker):
        to = target / file.relative_to(folder).as_posix()
        fs, path = _connect(to)
        with naming_store(to, "write"):
            _make_parent(fs, path)
            fs.put_file(str(file), path)


def check_store(url: str, *, key: str) -> None:
    """Write a small file to a store, read it and remove it.

    Raises:
        ConfigError: naming the key, if that fails.
    """
    # Ranks on other machines check the same folder.
    probe = RemotePath(url) / f".agentrl-can-write-{uuid.uuid4().hex}"
    content = probe.name.encode()
    try:
        probe.write_bytes(content)
        is_right = probe.read_bytes() == content
        probe.parent.remove_files([probe.name])
    except (StoreError, OSError) as error:
        raise ConfigError(
            f"cannot write to {url}: {reason_of(error)}",
            key=key,
            expected="a URL that every node can write to, with its credentials in the environment",
        ) from error
    if not is_right:
        raise ConfigError(f"{url} returns other bytes than were written", key=key)


@contextmanager
def naming_store(path: RemotePath, verb: str) -> Iterator[None]:
    """Turn the errors of a store, which each package has of its own, into one that names it.

    Raises:
        FileNotFoundError: if a file is missing.
        StoreError: for every other error.
    """
    try:
        yield
    except FileNotFoundError as error:
        text = error.strerror or str(error) or "no such file"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from error
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(
            f"cannot {verb} {path}: {reason_of(error)}", path=str(path), reason=reason_of(error)
        ) from error


def reason_of(error: Exception) -> str:
    """Return the cause of an error as one line."""
    if isinstance(error, StoreError):
        return str(error.details.get("reason", error.args[0]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:_MAX_REASON_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _RangeReader(io.RawIOBase):
    """Reads a file by requests for ranges of bytes. Several can read one file at a time."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path = path
        self._position = 0
        self._fs, self._remote = _connect(path)
        with naming_store(path, "read"):
            self._size = int(self._fs.size(self._remote) or 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        with naming_store(self._path, "read"):
            content = self._fs.cat_file(self._remote, start=self._position, end=end)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _connect(path: RemotePath) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of a URL, which fsspec keeps, and the path in it.

    Raises:
        ConfigError: for a protocol that fsspec does not know, or whose package is not installed.
    """
    from fsspec.core import url_to_fs

    with naming_store(path, "connect to"):
        try:
            return url_to_fs(path.url)
        except ImportError as error:
            raise StoreError(
                f"{path} needs a package of fsspec", path=str(path), reason=str(error)
            ) from error


def _make_parent(fs: "AbstractFileSystem", path: str) -> None:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if not protocols & _STORES_WITHOUT_FOLDERS:
        fs.makedirs(fs._parent(path), exist_ok=True)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
