"""Broadcast weights in a process group."""
# pyright: reportMissingImports=false

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.arguments import require_sglang
from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.weights.buckets import Bucket, NamedTensor, PlainMemory, fill_buckets
from agentrl.engines.sglang.weights.sync import (
    DEFAULT_BUCKET_BYTES,
    RELEASE_TIMEOUT_S,
    Target,
    UpdateParticipants,
)
from agentrl.errors import EngineError
from agentrl.plugins.cancellation import wait_despite_cancellation

POLL_S = 0.001
GROUP_TIMEOUT_S = 120.0
"""Seconds that the members of a process group wait for each other."""


class DistributedTransport:
    """Broadcasts weights from this process, rank 0 of a group, to all targets.

    A new group is made when the targets change. A member that fails breaks the group, and the
    update fails for all. The next group has the remaining targets.

    Args:
        address: Of this machine, as the targets reach it.
        backend: `nccl` between accelerators, `gloo` on a CPU.
        device: The weights are sent from it.
        bucket_bytes: Most bytes of memory besides the weights.
        timeout_s: Seconds that a broadcast, or making the group, may take.
    """

    def __init__(
        self,
        address: str,
        *,
        backend: str,
        device: torch.device,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> None:
        self._address = address
        self._backend = backend
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._group_name = ""
        self._members: list[Target] = []

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Send the weights to all participants (see `Transport.send`)."""
        require_sglang()
        figures = SyncFigures()
        try:
            await self._join(participants)
            await self._request(participants, "begin_weight_update")
            for bucket in fill_buckets(named_tensors, self._bucket_bytes, self._allocate):
                fields = self._bucket_fields(bucket)
                request = self._request(participants, "update_weights_from_distributed", fields)
                await self._together(request, partial(self._broadcast, bucket.flat))
                figures.add(bucket.num_bytes)
                del bucket  # its memory can be freed before the next one's is allocated
            await self._request(participants, "end_weight_update")
        except BaseException:
            await wait_despite_cancellation([asyncio.ensure_future(self.close())])
            raise
        return figures

    async def close(self) -> None:
        """Leave the group, and let its members leave it."""
        members, self._members = self._members, []
        fields = {"group_name": self._group_name}
        self._leave()
        await asyncio.gather(*(_destroy_group(target, fields) for target in members))

    async def _join(self, participants: UpdateParticipants) -> None:
        """Make a group with these members, unless it exists."""
        if self._group is not None and self._members == participants.targets:
            return
        await self.close()
        self._members = list(participants.targets)
        self._group_name = f"agentrl-{uuid.uuid4().hex}"
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        # This process is rank 0; then each target has `tp_size` ranks.
        *first_ranks, size = accumulate((one.tp_size for one in self._members), initial=1)
        offsets = dict(zip(self._members, first_ranks, strict=True))

        def fields(target: Target) -> dict[str, Any]:
            return {
                "master_address": self._address,
                "master_port": port,
                "rank_offset": offsets[target],
                "world_size": size,
                "group_name": self._group_name,
                "backend": self._backend,
            }

        request = self._request(participants, "init_weights_update_group", fields)
        await self._together(request, partial(self._open, port, size))

    def _open(self, port: int, size: int) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._group = init_custom_process_group(
            backend=self._backend,
            init_method=f"tcp://{self._address}:{port}",
            world_size=size,
            rank=0,
            group_name=self._group_name,
            timeout=self._timeout,
        )

    def _broadcast(self, flat: Tensor) -> None:
        group = self._group
        work: Any = dist.broadcast(flat, src=0, group=group, async_op=True)
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():  # NCCL's `wait` has no timeout
            if self._group is not group or time.monotonic() > deadline:
                raise EngineError("a broadcast of weights was not received by every member in time")
            time.sleep(POLL_S)
        work.wait()  # raises the reason of a failure
        if flat.device.type != "cpu":
            torch.accelerator.synchronize(flat.device)

    async def _request(
        self, participants: UpdateParticipants, request: str, fields: Any = None
    ) -> None:
        """Send a request to all members; if one fails, raise."""
        await participants.request(request, fields)
        for target, error in participants.failures.items():
            raise EngineError(f"{target.backend.name} left the group of the weights: {error}")

    async def _together(self, request: Coroutine[Any, Any, None], act: Callable[[], None]) -> None:
        """Run our part of a collective while the members run theirs; a failure ends it for all.

        Raises:
            EngineError: A member or this process fails.
        """
        theirs = asyncio.ensure_future(request)
        ours = asyncio.ensure_future(asyncio.to_thread(act))
        try:
            await asyncio.wait([theirs, ours], return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not (_succeeded(theirs) and _succeeded(ours)):
                self._leave()  # so that no member waits for the failed one
            await wait_despite_cancellation([theirs, ours])
        for error in (theirs.exception(), ours.exception()):
            if error is not None:
                raise error if isinstance(error, EngineError) else self._broken(error)

    def _broken(self, error: BaseException) -> EngineError:
        return EngineError(
            f"weights cannot be sent by a process group of {self._backend}: {error}",
            key="weight_sync.transport",
            expected="disk, or tensor if every server is on this machine",
        )

    def _allocate(self, num_bytes: int, _device: torch.device) -> PlainMemory:
        return PlainMemory(num_bytes, self._device)

    def _bucket_fields(self, bucket: Bucket[PlainMemory]) -> dict[str, Any]:
        return {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": True,
        }

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


async def _destroy_group(target: Target, fields: JsonFields) -> None:
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await target.backend.control("destroy_weights_update_group", fields)


def _succeeded(task: asyncio.Future[None]) -> bool:
    return task.done() and task.exception() is None
