"""The ranks of a run: who they are, and the few things that they tell each other.

A run without torchrun is a world of one: its process group lives on an in-memory store, opens no
port, and every exchange below is the identity.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import ConfigError

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank that waits longer than this for another raises instead of hanging."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, `dp`: all ranks shard the weights and split the rows."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what one rank should write."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers over the ranks, entry by entry, in float64."""
        if self.is_alone:
            return list(values)
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Take the largest over the ranks, entry by entry."""
        if self.is_alone:
            return list(values)
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def gather(self, item: T) -> list[T]:
        """Give every rank the items of all ranks, in the order of the ranks."""
        if self.is_alone:
            return [item]
        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item)
        return items  # pyright: ignore[reportReturnType]

    def broadcast(self, item: T) -> T:
        """Give every rank the item of the main rank."""
        if self.is_alone:
            return item
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self.is_alone:
            dist.barrier()

    def gather_flat(self, items: Iterable[T]) -> list[T]:
        """Give every rank the items of all ranks in one list, in the order of the ranks."""
        return [item for part in self.gather(list(items)) for item in part]


def start_world(device: str = "auto", *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
    """Join the ranks that torchrun started, or be a world of one.

    A process group that exists already is used as it is.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: Seconds that one collective may take.

    Raises:
        ConfigError: where `cuda` is asked for and there is none.
    """
    kind = resolve_device(device)
    if not dist.is_initialized():
        _init_process_group(kind, timedelta(seconds=timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("dp",))
    return World(rank=rank, size=size, device=_own_device(kind), mesh=mesh)


def stop_world() -> None:
    """Leave the process group; may be called twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def resolve_device(device: str) -> str:
    """Turn `auto` into the kind of device that is there.

    Raises:
        ConfigError: where `cuda` is asked for and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cuda, and torch sees no such device",
            key="trainer.device",
            expected="auto or cpu on this machine",
        )
    return device


def _init_process_group(kind: str, timeout: timedelta) -> None:
    backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(_own_device(kind))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _own_device(kind: str) -> torch.device:
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(kind)
