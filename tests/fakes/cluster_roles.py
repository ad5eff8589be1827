"""Roles of worker groups on a real Ray cluster."""

import os
import time
from typing import Any

import torch

from agentrl.cluster import Dispatch, Worker, register
from agentrl.protocol import DataProto


class Role(Worker):
    """A role that computes, and fails as it is asked to."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.scale = scale
        if scale < 0:
            raise ValueError("scale is negative")

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> list[str]:
        return [os.environ.get(name, "") for name in names]

    @register(Dispatch.ONE_TO_ALL)
    def size(self, value: Any) -> int:
        return value.nbytes

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scaled(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        data.batch["x"] *= self.scale
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scaled_later(self, data: DataProto) -> DataProto:
        return self.scaled(data)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int, how: str) -> None:
        """Fail on one rank; the others would answer much later."""
        print(f"rank {self.rank} is asked to {how}", flush=True)
        if self.rank != rank:
            time.sleep(60)
        if how == "raise":
            raise ValueError("a mistake of the user")
        os._exit(3)

    @register(Dispatch.ONE_TO_ALL, timeout_s=1)
    def hang(self, rank: int) -> None:
        print("going to sleep", flush=True)
        if self.rank == rank:
            time.sleep(60)


class Other(Worker):
    """A second role of the same process, with a coroutine."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def shifted(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        first = self.fused_worker_dict["first"]
        return DataProto.from_dict({"x": data.batch["x"] + 10 * first.scale})

    def process(self) -> int:
        return os.getpid()


def batch(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)})
