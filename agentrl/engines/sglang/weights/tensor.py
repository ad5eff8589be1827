"""Send weights to processes of this machine, in memory.

SharedMemory   CPU, to children of this process: they map the shared memory
DeviceMemory   GPU, to any process of this machine: it opens the memory through CUDA IPC
SentMemory     CPU, to any process: the bytes themselves are sent
"""
# pyright: reportMissingImports=false

import io
import pickle
from collections.abc import Callable, Iterable
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
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, Target, UpdateParticipants
from agentrl.errors import EngineError

SHARED_BYTES = 64 * 1024**2
"""Largest bucket in shared memory. The kernel clears each new page, so reusing a small bucket costs
less than a large one."""
SENT_BYTES = 16 * 1024**2
"""Largest bucket if its bytes are sent: they are copied several times."""
DEVICE_BUFFERS = 2
"""SGLang answers when its GPU has queued the copy, not when the copy is done. It then closes the
memory that it opened through CUDA IPC, and torch waits for the copies there. Its ranks synchronize
in each bucket, so every rank has done this when the next bucket is answered."""


class PickledMemory(Memory, Protocol):
    """Memory with tensors that another process can open."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors of this memory for one reader."""
        ...


Allocate = Callable[[int, torch.device], PickledMemory]
"""Makes memory from a number of bytes and the weights' device."""


class TensorTransport:
    """Sends weights in memory to processes of this machine.

    The trainer's own tensors are never shared: they are copied into the bucket, and from there into
    SGLang's weights.

    Args:
        bucket_bytes: Most bytes of memory besides the weights.
        allocate: Makes a bucket's memory.
        num_buffers: Memories that share these bytes (see `fill_buckets`).
    """

    def __init__(self, bucket_bytes: int, allocate: Allocate, *, num_buffers: int = 1) -> None:
        self._bucket_bytes = bucket_bytes
        self._allocate = allocate
        self._num_buffers = num_buffers

    @classmethod
    def to_children(cls, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Self:
        """Make a transport to this process's children: shared memory or CUDA IPC."""
        if has_accelerator():
            return cls(bucket_bytes, _shared_or_device, num_buffers=DEVICE_BUFFERS)
        return cls(min(bucket_bytes, SHARED_BYTES), _shared_or_device)

    @classmethod
    def to_servers(cls, device: torch.device, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Self:
        """Make a transport to any process of this machine: CUDA IPC, or the bytes themselves.

        Args:
            device: Of the weights.
            bucket_bytes: Most bytes of memory besides the weights.
        """
        if device.type == "cpu":
            return cls(min(bucket_bytes, SENT_BYTES), SentMemory)
        return cls(bucket_bytes, DeviceMemory, num_buffers=DEVICE_BUFFERS)

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Send the weights to all participants (see `Transport.send`)."""
        require_sglang()
        figures = SyncFigures()
        await participants.request("begin_weight_update")
        buckets = fill_buckets(
            named_tensors, self._bucket_bytes, self._allocate, num_buffers=self._num_buffers
        )
        for bucket in buckets:
            if bucket.flat.device.type != "cpu":
                # Another process reads the bucket: wait until the bytes are in it.
                torch.accelerator.synchronize(bucket.flat.device)
            await participants.request(
                "update_weights_from_tensor", partial(_tensor_fields, bucket)
            )
            figures.add(bucket.num_bytes)
            del bucket  # its memory can be freed before the next one's is allocated
        await participants.request("end_weight_update")
        return figures

    async def close(self) -> None:
        """Do nothing: no memory is kept between two updates."""


def _tensor_fields(bucket: Bucket[PickledMemory], target: Target) -> dict[str, Any]:
    # Each rank counts the references of its own handle.
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


# Memory.


def _shared_or_device(num_bytes: int, device: torch.device) -> PickledMemory:
    return SharedMemory(num_bytes) if device.type == "cpu" else DeviceMemory(num_bytes, device)


class SharedMemory:
    """Shared memory of the CPU without a name, which ends with the last process that maps it.

    A reader gets it from this process, with the key that children inherit.

    Raises:
        EngineError: The machine does not have that much.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self._storage: Any = torch.UntypedStorage._new_using_fd_cpu(num_bytes)
        except RuntimeError as error:
            raise EngineError(
                f"no shared memory for a bucket of {num_bytes} bytes of weights: {error}",
                key="weight_sync.bucket_bytes",
                expected="fewer than are free in /dev/shm (a container's default is 64 MiB)",
            ) from error
        self.flat = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors of this memory for one reader."""
        return _dumps(self._reduce, parts)

    def _reduce(self, obj: Any) -> Any:
        # As torch does it, independent of the sharing strategy of this process.
        if not isinstance(obj, torch.UntypedStorage):
            return NotImplemented
        descriptor, size = self._storage._share_fd_cpu_()
        return reductions.rebuild_storage_fd, (type(obj), DupFd(descriptor), size)


class DeviceMemory(PlainMemory):
    """Memory of a GPU, which another process of the machine opens."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors of this memory for one reader."""
        return _dumps(_reduce_cuda, parts)


class SentMemory(PlainMemory):
    """Memory of this process. Its bytes are sent."""

    def dumps(self, parts: dict[str, Any]) -> bytes:
        """Pickle tensors of this memory, and only their bytes."""
        own = {**parts, "flattened_tensor": parts["flattened_tensor"].clone()}
        return pickle.dumps(own)


_DEVICE = 6
"""Index of the device among the arguments with which torch rebuilds a tensor of a GPU."""


def _reduce_cuda(obj: Any) -> Any:
    """Identify the GPU by its UUID, because each process may see and count GPUs differently.

    SGLang replaces torch's functions for this in the whole process, and then they fail for tensors
    of the CPU.
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
