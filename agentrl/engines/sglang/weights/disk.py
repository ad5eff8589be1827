"""Weights by way of a folder."""

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
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, Roster
from agentrl.errors import EngineError


class DiskTransport:
    """Writes weights as safetensors, and has every target read them. The way that always works.

    They are written aside, flushed and renamed, so that nobody reads half of them; and removed when
    all have read them, whatever came of it.

    Args:
        folder: That this process can write and all targets can read, at the same path; its own.
        bucket_bytes: Most bytes of one file, and of gathered weights that wait for it.
    """

    def __init__(self, folder: Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._has_written = False

    async def send(self, roster: Roster, named_tensors: Iterable[NamedTensor]) -> SyncFigures:
        """Bring the weights to everyone on the roster (see `Transport.send`)."""
        try:
            figures = await self._write(named_tensors)
            fields = {
                "model_path": str(self._place),
                "load_format": "safetensors",
                "flush_cache": True,
            }
            await roster.ask("update_weights_from_disk", fields)
        finally:
            await self.close()
        return figures

    async def close(self) -> None:
        """Remove what this process has written: other ranks may have been given the same folder."""
        if self._has_written:
            self._remove()

    def _remove(self) -> None:
        for path in (self._place, self._aside):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def _place(self) -> Path:
        return self._folder / "current"

    @property
    def _aside(self) -> Path:
        return self._folder / "written"

    async def _write(self, named_tensors: Iterable[NamedTensor]) -> SyncFigures:
        self._has_written = True
        self._remove()  # what a run that was killed has left
        figures = SyncFigures()
        try:
            self._aside.mkdir(parents=True)
            for tensors in group_tensors(named_tensors, self._bucket_bytes):
                path = self._aside / f"model-{figures.num_buckets:05}.safetensors"
                await asyncio.to_thread(_save, tensors, path)
                figures.add(sum(tensor.nbytes for tensor in tensors.values()))
            _flush(self._aside)
            self._aside.rename(self._place)
            _flush(self._folder)
        except (OSError, SafetensorError) as error:
            raise _not_written(self._folder, error) from error
        return figures


def group_tensors(
    named_tensors: Iterable[NamedTensor], bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Collect tensors in groups of at most `bucket_bytes`; a larger one goes alone."""
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
    """Have a file's bytes, or a folder's entries, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _not_written(folder: Path, error: Exception) -> EngineError:
    return EngineError(
        f"the weights cannot be written to {folder}: {error}",
        key="weight_sync.folder",
        expected="a folder with room for the whole policy, which every server can read",
    )
