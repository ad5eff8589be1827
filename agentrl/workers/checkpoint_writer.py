"""Write a checkpoint in the background: each rank its own slices, the main rank the rest.

Training waits while each rank copies its state to host memory (pinned on a CUDA device). A thread
of each rank then writes the copy to `rank_K.safetensors` in the temporary folder, hashes it, and
writes `rank_K.json` with the digests. The main rank's thread waits for these files of all ranks,
writes the manifest and renames the folder. The threads exchange files and no messages, so they
cannot disturb the collectives of training. This needs a folder that all ranks see.

In a store (`s3://...`) the files are written to the checkpoint's folder itself, from memory and
without a copy on the disk, and the manifest makes it a checkpoint. A folder without a manifest is
what an interrupted save left; the next save removes it.
"""

import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.atomic_io import (
    atomic_folder,
    make_folder,
    remove_folder,
    remove_leftovers,
)
from agentrl.errors import CheckpointError, StoreError, is_out_of_memory
from agentrl.messages import dump_json
from agentrl.remote_io import Location, RemotePath, reason_of, write_whole
from agentrl.workers.checkpoint import (
    DTYPES,
    MANIFEST,
    STATE,
    Manifest,
    Piece,
    RunState,
    StoredSlice,
    file_sizes,
    is_step,
    newest_first,
)
from agentrl.workers.shards import LocalSlice, byte_view

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**26
"""Bytes that are copied, written and hashed together: a power of two, because torch rounds pinned
memory up to one."""
GRACE_S = 10.0
"""A run that ends with an error waits for the files of other ranks until none has grown for so many
seconds."""
_POLL_S = 0.02
_STORE_POLL_S = 1.0
"""Seconds between two listings of a store."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The content of a rank's safetensors file, in host memory."""

    header: bytes
    pieces: deque[Tensor]
    slices: dict[str, StoredSlice]

    def take_pieces(self) -> Iterator[memoryview]:
        """Iterate over the bytes; the memory of each piece is freed after its use."""
        yield memoryview(self.header)
        while self.pieces:
            yield self.pieces.popleft().numpy().data


def copy_to_host(slices: Mapping[str, LocalSlice], rank: int) -> HostCopy:
    """Copy a rank's slices to host memory. A slice that several ranks hold is copied by one.

    Raises:
        CheckpointError: if the memory is not sufficient.
    """
    own = {
        name: slices[name]
        for number, name in enumerate(sorted(slices))
        if number % slices[name].num_copies == slices[name].copy and slices[name].local.numel()
    }
    # Large elements first, so that each tensor in the file is aligned to its elements.
    names = sorted(own, key=lambda name: -own[name].local.element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        local = own[name].local
        start, end = end, end + local.nbytes
        header[name] = {
            "dtype": _NAMES[local.dtype], "shape": list(local.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = rank_file(rank)
    stored = {
        name: StoredSlice(file, list(one.offset), list(one.local.shape))
        for name, one in own.items()
    }
    try:
        pieces = _copy_pieces([own[name].local for name in names], end)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"cannot write a checkpoint: no memory for a copy of {end / 1e9:.1f} GB",
            expected="host memory for a copy of each rank's weights and moments",
        ) from error
    return HostCopy(len(text).to_bytes(8, "little") + text, pieces, stored)


def rank_file(rank: int | str) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.safetensors"


@dataclass(slots=True)
class CheckpointWriter:
    """Writes one checkpoint. The main rank begins and publishes; each rank writes its file."""

    root: Location
    """The folder of the run's checkpoints."""
    state: RunState
    num_ranks: int = 1
    keep: int | None = None
    """Number of checkpoints to keep, including this one; None: all. Those of later steps belong to
    another run: they are not counted and not removed (see `set_aside_later`)."""
    best: int | None = None
    """A step; its checkpoint is kept in addition."""
    patience_s: float = 1800.0
    """Limit of the wait for the other ranks, in seconds in which no file grows."""
    _draft: ExitStack = field(default_factory=ExitStack)

    @property
    def folder(self) -> Location:
        """The checkpoint's folder."""
        return self.root / f"global_step_{self.state.step}"

    def begin(self) -> Location:
        """Make the temporary folder, after the leftovers of killed runs are removed.

        In a store it is the checkpoint's own folder.

        Raises:
            CheckpointError: if it cannot be made.
        """
        with self._naming_folder():
            if isinstance(self.root, RemotePath):
                for folder in self.root.folders():
                    if is_step(folder) and not (folder / MANIFEST).is_file():
                        folder.remove_folder(MANIFEST)
                draft = self.root / self.folder.name
                draft.remove_folder(MANIFEST)
                return draft
            make_folder(self.root)
            remove_leftovers(self.root)
            return self._draft.enter_context(atomic_folder(self.root / self.folder.name))

    def write_rank(self, draft: Location, rank: int, host: HostCopy) -> None:
        """Write a rank's file, flush it, then write its digests for the main rank.

        Raises:
            CheckpointError: if the disk does not take it.
        """
        with self._naming_folder():
            pieces = _write_file(draft / rank_file(rank), host.take_pieces())
            record = json.dumps({"pieces": pieces, "slices": host.slices}).encode()
            write_whole(draft / _record(rank), record)

    def publish(self, draft: Location) -> Location:
        """Wait for the files of all ranks, make the checkpoint visible, and remove older ones.

        Returns:
            Its folder.

        Raises:
            CheckpointError: if a rank does not write its file; the temporary folder is removed, or
                has no manifest.
        """
        with self._naming_folder(), self._draft:
            records = self._await_records(draft)
            tensors: dict[str, list[StoredSlice]] = {}
            for record in records:
                for name, stored in record["slices"].items():
                    tensors.setdefault(name, []).append(StoredSlice(*stored))
            files = {
                rank_file(rank): [Piece(*piece) for piece in record["pieces"]]
                for rank, record in enumerate(records)
            }
            text = dump_json(asdict(self.state), indent=1, for_file=True)
            files[STATE] = _write_file(draft / STATE, [text.encode()])
            manifest = Manifest(files, tensors).to_json().encode()
            if isinstance(draft, Path):
                for rank in range(self.num_ranks):
                    (draft / _record(rank)).unlink()
                _write_file(draft / MANIFEST, [manifest])
            else:
                self._check_uploads(draft, files)
                (draft / MANIFEST).write_bytes(manifest)
        if isinstance(draft, RemotePath):
            with _warning(f"{draft} keeps temporary files"):
                draft.remove_files([_record(rank) for rank in range(self.num_ranks)])
        self._remove_older()
        return self.folder

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"cannot write a checkpoint: {error}"
            raise CheckpointError(message, path=self.folder) from error
        except StoreError as error:
            raise CheckpointError(
                f"cannot write a checkpoint: {error.args[0]}",
                path=self.folder,
                expected="a store that answers, has space, and accepts the credentials; the "
                "checkpoint before this one is unchanged",
            ) from error

    def _check_uploads(self, draft: RemotePath, files: Mapping[str, list[Piece]]) -> None:
        sizes = draft.file_sizes()
        for name, pieces in files.items():
            num_bytes = sum(piece.num_bytes for piece in pieces)
            if sizes.get(name) != num_bytes:
                raise CheckpointError(
                    f"cannot write a checkpoint: the store has {sizes.get(name, 0)} bytes of "
                    f"{name}, and {num_bytes} were written",
                    path=self.folder,
                )

    def _await_records(self, draft: Location) -> list[dict[str, Any]]:
        names = [_record(rank) for rank in range(self.num_ranks)]
        size, since = -1, time.monotonic()
        while missing := [name for name in names if name not in (sizes := file_sizes(draft))]:
            now, grown = time.monotonic(), sum(sizes.values())
            if grown != size:
                size, since = grown, now
            elif now - since > self.patience_s:
                raise CheckpointError(
                    "cannot write a checkpoint: "
                    f"{', '.join(name.removesuffix('.json') for name in missing)} did not write "
                    "its part",
                    path=self.folder,
                    expected="ranks that see the same folder, and write to it within "
                    "trainer.collective_timeout_s",
                )
            time.sleep(_POLL_S if isinstance(draft, Path) else _STORE_POLL_S)
        return [json.loads((draft / name).read_bytes()) for name in names]

    def _remove_older(self) -> None:
        step = self.state.step
        before = [path for num, path in newest_first(self.root) if num < step and num != self.best]
        for path in before[self.keep - 1 :] if self.keep else []:
            with _warning(f"{path.name} cannot be removed"):
                if isinstance(path, RemotePath):
                    path.remove_folder(MANIFEST)
                else:
                    remove_folder(path)


@contextmanager
def _warning(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreError) as error:
        reason = reason_of(error) if isinstance(error, StoreError) else error
        logger.warning("%s: %s", what, reason)


def _record(rank: int) -> str:
    return f"rank_{rank}.json"


def _copy_pieces(tensors: list[Tensor], num_bytes: int) -> deque[Tensor]:
    """Copy the bytes of tensors, one after the other, into pieces of equal size."""
    is_on_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
    pieces, room = deque[Tensor](), 0
    for data in map(byte_view, tensors):
        start = 0
        while start < len(data):
            if room == 0:
                room = min(PIECE_BYTES, num_bytes)
                num_bytes -= room
                pieces.append(torch.empty(room, dtype=torch.uint8, pin_memory=is_on_cuda))
            num = min(len(data) - start, room)
            piece = pieces[-1][len(pieces[-1]) - room :]
            piece[:num].copy_(data[start : start + num], non_blocking=True)
            start, room = start + num, room - num
    if is_on_cuda:
        torch.cuda.synchronize()
    return pieces


def _write_file(path: Location, pieces: Iterable[bytes | memoryview]) -> list[Piece]:
    """Write and flush a file; return the digests of its pieces."""
    written: list[Piece] = []
    with path.open("wb") if isinstance(path, Path) else path.create() as file:
        for data in pieces:
            file.write(data)
            written.append(Piece(len(data), hashlib.sha256(data).hexdigest()))
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return written
