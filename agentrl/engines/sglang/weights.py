"""New weights -> SGLang, in buckets of bounded size."""
# pyright: reportMissingImports=false

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.engines.sglang.backend import Backend

if TYPE_CHECKING:
    from torch import Tensor

NamedTensor = tuple[str, "Tensor"]
DEFAULT_BUCKET_BYTES = 512 * 1024**2


@dataclass(slots=True)
class SyncFigures:
    """What the last sync moved."""

    num_bytes: int = 0
    num_buckets: int = 0


def iter_buckets(
    named_tensors: Iterable[NamedTensor], bucket_bytes: int
) -> Iterator[list[NamedTensor]]:
    """Collect tensors into buckets of at most `bucket_bytes`; a larger tensor is one of its own.

    A tensor that comes under two names (tied weights) is sent under the first.
    """
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


async def send_tensors(
    backend: Backend, named_tensors: Iterable[NamedTensor], *, bucket_bytes: int, copies: int
) -> SyncFigures:
    """Hand weights over in memory: CUDA IPC on a GPU, shared memory on a CPU.

    Args:
        backend: On this machine, its update begun.
        named_tensors: Whole weights by Hugging Face name.
        bucket_bytes: Most bytes that exist beside the weights at one time.
        copies: One serialized form for each of SGLang's tensor-parallel ranks.
    """
    figures = SyncFigures()
    for bucket in iter_buckets(named_tensors, bucket_bytes):
        payload = _serialize(bucket, copies)
        await backend.control(
            "update_weights_from_tensor",
            {
                "serialized_named_tensors": payload,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            },
        )
        figures.num_buckets += 1
        figures.num_bytes += sum(tensor.nbytes for _, tensor in bucket)
    return figures


def _serialize(bucket: list[NamedTensor], copies: int) -> list[bytes]:
    """Flatten a bucket into one tensor, so that the trainer's own never enter shared memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=bucket)
    parts = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return [MultiprocessingSerializer.serialize(parts) for _ in range(copies)]
