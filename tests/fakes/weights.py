"""Things that take weights: a SGLang that writes down what it is asked, and a way to bring them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.weights.buckets import NamedTensor, PlainMemory, fill_buckets
from agentrl.engines.sglang.weights.sync import UpdateParticipants
from agentrl.errors import EngineError

BUCKET = "take_bucket"


class RecordingBackend:
    """Does nothing but write down its requests, and fail where it is told to.

    Args:
        name: What errors call it.
        fails: Takes a request and how often it came before; says whether it is refused.
    """

    def __init__(
        self, name: str = "one", fails: Callable[[str, int], bool] = lambda request, count: False
    ) -> None:
        self.name = name
        self.requests: list[str] = []
        self.fields: list[Mapping[str, Any]] = []
        self.is_paused = False
        self.hold: asyncio.Event | None = None
        """Answers to buckets wait for it."""
        self.is_reading = asyncio.Event()
        """A bucket waits so."""
        self._fails = fails

    async def generate(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    async def control(self, request: str, fields: Mapping[str, Any] | None = None) -> None:
        count = self.requests.count(request)
        self.requests.append(request)
        self.fields.append(dict(fields or {}))
        if request == BUCKET and self.hold is not None:
            self.is_reading.set()
            await self.hold.wait()
            self.requests.append("bucket taken")
        await asyncio.sleep(0)
        if self._fails(request, count):
            raise EngineError(f"{self.name} refuses {request}")
        if request == "pause_generation":
            self.is_paused = True
        if request == "continue_generation":
            self.is_paused = False


class BucketTransport:
    """Tells everyone of each bucket."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        figures = SyncFigures()
        await participants.request("begin_weight_update")
        for bucket in fill_buckets(named_tensors, self._bucket_bytes, PlainMemory):
            await participants.request(BUCKET, {"names": [entry.name for entry in bucket.entries]})
            figures.add(bucket.num_bytes)
        await participants.request("end_weight_update")
        return figures

    async def close(self) -> None:
        pass


def weights_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[NamedTensor]:
    """Tensors of so many elements, each with other values."""
    return [(f"w{i}", torch.arange(size).to(dtype) + i) for i, size in enumerate(sizes)]
