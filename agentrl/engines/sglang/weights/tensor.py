"""Weights to processes of this machine, in memory.

SharedMemory   the CPU, to this process's own children: they map what they are lent
DeviceMemory   a GPU, to any process of this machine: they open it by CUDA IPC
SentMemory     the CPU, to any process: what is sent is the bytes themselves
"""
# pyright: reportMissingImports=false

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Protocol, Self

import torch
from torch.multiprocessing import reductions

from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.arguments import has_accelerator, require_sglang
from agentrl.engines.sglang.weights.buckets import (
    Bucket,
    Memory,
    NamedTensor,
    PlainMemory,
    fill_buckets,
)
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, Roster, Target
from agentrl.errors import EngineError

SHARED_BYTES = 64 * 1024**2
"""Bytes of a bucket at most in shared memory: the kernel clears each page of it before it is used,
so one that is used again and again costs less than a large one."""
SENT_BYTES = 16 * 1024**2
"""Bytes of a bucket at most whose bytes are sent: they are copied several times on their way."""

DEVICE_TURNS = 2
"""SGLang answers when its GPU has been told to copy, not when it has copied. What it opened by CUDA
IPC it gives back right after, and torch waits for the copies there; every rank has done so by the
time that the next bucket is answered, for its ranks meet in each bucket."""


class PickledMemory(Memory, Protocol):
    """Memory that knows how another process comes to what lies in it."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors that lie in it for one reader."""
        ...


Allocate = Callable[[int, torch.device], PickledMemory]
"""Bytes, and where the weights are -> memory."""


class TensorTransport:
    """Hands weights over in memory, to processes of this machine.

    The trainer's own tensors are never shared: they are copied once into the bucket, and from there
    into SGLang's weights.

    Args:
        bucket_bytes: Most bytes that exist beside the weights at one time.
        allocate: Gives the bucket's memory.
        in_turn: How many buckets share these bytes (see `fill_buckets`).
    """

    def __init__(self, bucket_bytes: int, allocate: Allocate, *, in_turn: int = 1) -> None:
        self._bucket_bytes = bucket_bytes
        self._allocate = allocate
        self._in_turn = in_turn

    @classmethod
    def to_children(cls, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Self:
        """To processes that this one has started: by shared memory or CUDA IPC."""
        if has_accelerator():
            return cls(bucket_bytes, _shared_or_device, in_turn=DEVICE_TURNS)
        return cls(min(bucket_bytes, SHARED_BYTES), _shared_or_device)

    @classmethod
    def to_servers(cls, device: torch.device, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Self:
        """To any process of this machine: by CUDA IPC, or by their bytes, a few at a time.

        Args:
            device: Where the weights are.
            bucket_bytes: Most bytes that exist beside the weights at one time.
        """
        if device.type == "cpu":
            return cls(min(bucket_bytes, SENT_BYTES), SentMemory)
        return cls(bucket_bytes, DeviceMemory, in_turn=DEVICE_TURNS)

    async def send(self, roster: Roster, named_tensors: Iterable[NamedTensor]) -> SyncFigures:
        """Bring the weights to everyone on the roster (see `Transport.send`)."""
        require_sglang()
        figures = SyncFigures()
        await roster.ask("begin_weight_update")
        for bucket in self._buckets(named_tensors):
            _finish_copies(bucket)
            await roster.ask("update_weights_from_tensor", partial(_tensor_fields, bucket))
            figures.add(bucket.num_bytes)
            del bucket  # its memory may be given back before the next one's is taken
        await roster.ask("end_weight_update")
        return figures

    def _buckets(self, named_tensors: Iterable[NamedTensor]) -> Iterator[Bucket[PickledMemory]]:
        return fill_buckets(
            named_tensors, self._bucket_bytes, self._allocate, in_turn=self._in_turn
        )

    async def close(self) -> None:
        """Nothing is held between two updates."""


def _tensor_fields(bucket: Bucket[PickledMemory], target: Target) -> dict[str, Any]:
    # Each rank counts its own copy of the handle, so each gets one.
    return {
        "serialized_named_tensors": [serialize(bucket) for _ in range(target.tp_size)],
        "load_format": "flattened_bucket",
        "flush_cache": True,
    }


def serialize(bucket: Bucket[PickledMemory]) -> bytes:
    """Pickle a bucket and its description for one reader."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            start_idx=entry.start_idx,
            end_idx=entry.end_idx,
            numel=entry.numel,
        )
        for entry in bucket.entries
    ]
    return bucket.memory.dumps({"flattened_tensor": bucket.flat, "metadata": metadata})


def _finish_copies(bucket: Bucket[PickledMemory]) -> None:
    """Wait until the bytes are in the bucket: its reader is another process."""
    if bucket.flat.device.type != "cpu":
        torch.accelerator.synchronize(bucket.flat.device)


# Memory.


def _shared_or_device(num_bytes: int, device: torch.device) -> PickledMemory:
    return SharedMemory(num_bytes) if device.type == "cpu" else DeviceMemory(num_bytes, device)


class SharedMemory:
    """Memory of the CPU without a name: it goes with the last process that has it mapped, whatever
    ends them. A reader asks this process for it, with the key that children inherit.

    Raises:
        EngineError: where the machine has not that much.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self._storage: Any = torch.UntypedStorage._new_using_fd_cpu(num_bytes)
        except RuntimeError as error:
            raise _no_shared_memory(num_bytes, error) from error
        self.flat = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors that lie in it for one reader."""
        return _dumps(self._reduce, parts)

    def _reduce(self, obj: Any) -> Any:
        # As torch reduces it, whichever way tensors are shared in this process otherwise.
        if not isinstance(obj, torch.UntypedStorage):
            return NotImplemented
        descriptor, size = self._storage._share_fd_cpu_()
        return reductions.rebuild_storage_fd, (type(obj), DupFd(descriptor), size)


class DeviceMemory(PlainMemory):
    """Memory of a GPU, which another process of the machine opens."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors that lie in it for one reader."""
        return _dumps(_reduce_cuda, parts)


class SentMemory(PlainMemory):
    """Memory of this process, whose bytes are sent."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors that lie in it, and no more of it than they."""
        own = {**parts, "flattened_tensor": parts["flattened_tensor"].clone()}
        return pickle.dumps(own)


_DEVICE = 6
"""Where the device stands among the arguments by which torch rebuilds a tensor of a GPU."""


def _reduce_cuda(obj: Any) -> Any:
    """Name the GPU by its own number: a process may see others, or count them otherwise.

    SGLang changes torch's functions to this end, for the whole process, and they then fail for
    tensors of the CPU.
    """
    from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified

    if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
        return NotImplemented
    reduce: Any = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)
    _, arguments = reduce(obj)
    uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
    named = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return _rebuild_cuda_tensor_modified, named


def _dumps(reduce: Callable[[Any], Any], parts: dict[str, Any]) -> bytes:
    class Pickler(ForkingPickler):
        def reducer_override(self, obj: Any) -> Any:
            return reduce(obj)

    written = io.BytesIO()
    Pickler(written).dump(parts)
    return written.getvalue()


def _no_shared_memory(num_bytes: int, error: RuntimeError) -> EngineError:
    return EngineError(
        f"no shared memory for a bucket of {num_bytes} bytes of weights: {error}",
        key="weight_sync.bucket_bytes",
        expected="fewer than are free in /dev/shm (a container has 64 MiB of it unless it is told "
        "otherwise)",
    )
