"""Send weights through a folder."""

import asyncio
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.weights.buckets import NamedTensor
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, UpdateParticipants
from agentrl.errors import EngineError


class DiskTransport:
    """Writes weights as safetensors, which every target reads. It works on every machine.

    The files are written to another folder, flushed and renamed, so that no target reads half of
    them. They are removed after the update, also if it fails.

    Args:
        folder: This process can write it, and all targets can read it at the same path. It is used
            for nothing else.
        bucket_bytes: Most bytes of one file, and of gathered weights that wait for it.
    """

    def __init__(self, folder: Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._has_written = False
        self._current, self._unfinished = folder / "current", folder / "written"

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Send the weights to all participants (see `Transport.send`)."""
        try:
            figures = await self._write(named_tensors)
            fields = {
                "model_path": str(self._current),
                "load_format": "safetensors",
                "flush_cache": True,
            }
            await participants.request("update_weights_from_disk", fields)
        finally:
            await self.close()
        return figures

    async def close(self) -> None:
        """Remove this process's files; other ranks may use the same folder."""
        if self._has_written:
            self._remove()

    def _remove(self) -> None:
        for path in (self._current, self._unfinished):
            shutil.rmtree(path, ignore_errors=True)

    async def _write(self, named_tensors: Iterable[NamedTensor]) -> SyncFigures:
        self._has_written = True
        self._remove()  # the files of a killed run
        figures = SyncFigures()
        try:
            self._unfinished.mkdir(parents=True)
            for tensors in group_tensors(named_tensors, self._bucket_bytes):
                path = self._unfinished / f"model-{figures.num_buckets:05}.safetensors"
                await asyncio.to_thread(_save, tensors, path)
                figures.add(sum(tensor.nbytes for tensor in tensors.values()))
            _flush(self._unfinished)
            self._unfinished.rename(self._current)
            _flush(self._folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"the weights cannot be written to {self._folder}: {error}",
                key="weight_sync.folder",
                expected="a folder with free space for the whole policy, which every server can "
                "read",
            ) from error
        return figures


def group_tensors(
    named_tensors: Iterable[NamedTensor], bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Collect tensors in groups of at most `bucket_bytes`; a larger one is a group of its own."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if group and size + tensor.nbytes > bucket_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    _flush(path)


def _flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
