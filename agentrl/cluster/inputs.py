"""Copy inputs of a run, which are only on the driver's machine, to the node of a process.

An actor on the driver's machine gives out their bytes in pieces, through the object store. The
first process of a node that starts copies an input into a folder that is named by the digest of its
content; the others wait. A node that joins later does the same, and a run that starts again finds
the copies. `agentrl.cluster.shipping` decides what is copied.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from agentrl.atomic_io import atomic_folder
from agentrl.errors import ClusterError, ConfigError

PIECE_BYTES = 2**23
"""Bytes of one answer of the driver's machine."""
_HASH_BYTES = 2**20
Read = Callable[[str, str, int, int], bytes]
"""Returns bytes of a file: digest of the input, path in it, offset, number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file or a folder that is copied."""

    target: str
    """Its path on every node: a name in the folder that is named by the digest."""
    digest: str
    files: tuple[tuple[str, int, str], ...]
    """Path in the input (`.` for a file itself), bytes and SHA-256 of each file."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """What processes copy to their node before they start."""

    inputs: tuple[Input, ...] = ()
    server: Any = None
    """The actor on the driver's machine."""

    def fetch(self, *, timeout_s: float) -> None:
        """Copy what this node lacks. Another process of the node that copies it is waited for.

        Raises:
            ClusterError: if the driver's machine does not answer, or the files changed there.
            ConfigError: if this node cannot store it.
        """

        def read(*arguments: Any) -> bytes:
            return ray.get(self.server.read.remote(*arguments), timeout=timeout_s)

        for one in self.inputs:
            fetch_input(one, read)


class InputServer:
    """Gives out bytes of inputs. An actor on the driver's machine.

    Args:
        sources: The path of each input by its digest.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def read(self, digest: str, name: str, offset: int, num_bytes: int) -> bytes:
        """Return bytes of a file of an input."""
        with (Path(self._sources[digest]) / name).open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)


def describe_input(path: Path, cache: Path) -> Input:
    """Hash an input, and choose its path on the nodes.

    Raises:
        ConfigError: if a file cannot be read.
    """
    try:
        files = tuple((name, (path / name).stat().st_size, _hash(path / name))
                      for name in file_names(path))  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot copy {path} to the nodes: {error}") from error
    name = path.absolute().name
    digest = hashlib.sha256(repr((name, files)).encode()).hexdigest()[:32]
    return Input(target=str(cache / digest / name), digest=digest, files=files)


def fetch_input(one: Input, read: Read) -> None:
    """Copy an input to its path on this node, complete or not at all, if it is not there yet.

    Raises:
        ClusterError: if a file is not the one that was described.
        ConfigError: if it cannot be written.
    """
    folder = Path(one.target).parent
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if folder.exists():
                return
            with atomic_folder(folder) as draft:
                for name, num_bytes, sha256 in one.files:
                    file = draft / Path(one.target).name / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    if _copy(one.digest, name, num_bytes, file, read) != sha256:
                        raise ClusterError(
                            f"{name} of {folder.name} changed on the driver's machine while the "
                            "run started",
                            expected="files that do not change; start the run again",
                        )
    except OSError as error:
        raise ConfigError(
            f"cannot copy inputs to {folder.parent} of this node: {error}",
            key="cluster.cache_dir",
            expected="a folder that every node can write to, with space for models and data",
        ) from error


def _copy(digest: str, name: str, num_bytes: int, file: Path, read: Read) -> str:
    found = hashlib.sha256()
    with file.open("wb") as stream:
        for offset in range(0, num_bytes, PIECE_BYTES):
            piece = read(digest, name, offset, min(PIECE_BYTES, num_bytes - offset))
            stream.write(piece)
            found.update(piece)
    return found.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_names(path: Path) -> Sequence[str]:
    """List the files below an input; `.` is an input that is a file itself."""
    if path.is_file():
        return ["."]
    return sorted(
        str((Path(folder) / name).relative_to(path))
        for folder, _, names in os.walk(path, followlinks=True)
        for name in names
    )


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_HASH_BYTES):
            found.update(data)
    return found.hexdigest()
