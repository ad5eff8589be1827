"""The ranks of a run: who they are, and the few things that they tell each other.

A run without torchrun is a world of one: its process group lives on an in-memory store, opens no
port, and every exchange below is the identity.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import ConfigError, RankError
from agentrl.workers.board import Board, is_broken_exchange, open_board

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, `dp`: all ranks shard the weights and split the rows."""
    board: Board
    """What the ranks leave for each other to read, should one of them not come."""

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
        tensor = torch.tensor(values, dtype=torch.float64, device=self._carrier)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    @property
    def _carrier(self) -> torch.device:
        """Where a tensor lies to be exchanged: not on the CPU where somebody else chose NCCL."""
        cpu = torch.device("cpu")
        return cpu if "gloo" in str(dist.get_backend_config()) else self.device

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

    def gather_flat(self, items: Iterable[T]) -> list[T]:
        """Give every rank the items of all ranks in one list, in the order of the ranks."""
        return [item for part in self.gather(list(items)) for item in part]

    def gather_on_main(self, items: Iterable[T]) -> list[T]:
        """Give the main rank the items of all ranks in one list; the others get none."""
        mine = list(items)
        if self.is_alone:
            return mine
        parts: list[list[T]] | None = [[]] * self.size if self.is_main else None
        dist.gather_object(mine, parts, dst=0)
        return [item for part in parts or [] for item in part]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Give every rank the rows of all ranks, in the order of the ranks.

        Args:
            rows: `[b, ...]`; b may differ from rank to rank, and be 0.
        """
        if self.is_alone:
            return rows
        counts = self.gather(len(rows))
        padded = rows.new_zeros(max(counts), *rows.shape[1:], device=self._carrier)
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        known = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat(known).to(rows.device)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Let every rank leave the block, and raise on all of them where one raised.

        For work in which no rank waits for another: a rank that fails would otherwise be waited for
        until the time limit. A collective, behind the block. What ends a process (Ctrl-C) passes
        through without it.

        Raises:
            RankError: where another rank raised.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, when all know of it
            failure = error
        if not self.is_alone:
            self.board.note(f"the wait behind {self.board.place}")
        words = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        for rank, told in enumerate(words):
            if failure is None and told is not None:
                failure = RankError(f"rank {rank} failed: {told}")
        if failure is not None:
            self.board.shared = failure
            raise failure


def start_world(device: str, *, timeout_s: float) -> World:
    """Join the ranks that torchrun started, or be a world of one.

    A process group that exists already is used as it is.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: Seconds that one collective may take, the joining included; a rank that waits
            longer for another raises instead of hanging.

    Raises:
        ConfigError: where `cuda` is asked for and there is none.
        RankError: where the others do not come.
    """
    kind = resolve_device(device)
    store = None
    if not dist.is_initialized():
        try:
            store = _init_process_group(kind, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _not_joined(error, timeout_s) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(
        rank=rank,
        size=size,
        device=_own_device(kind),
        mesh=init_device_mesh(kind, (size,), mesh_dim_names=("dp",)),
        board=open_board(store, rank=rank, size=size, timeout_s=timeout_s),
    )


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


def _init_process_group(kind: str, timeout: timedelta) -> Any:
    """Join the ranks; returns the store by which they found each other."""
    if kind == "cuda":
        torch.cuda.set_device(_own_device(kind))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        backend = "nccl" if kind == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return store
    # What the ranks tell each other goes by gloo on any device: a wait that is too long raises
    # there, where NCCL's watchdog would end the process without a word.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return store


def _not_joined(error: RuntimeError, timeout_s: float) -> RuntimeError:
    if not is_broken_exchange(error):
        return error
    rank, size = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
    return RankError(
        f"rank {rank} of {size} could not join the others within {timeout_s:g} s: "
        f"{str(error).splitlines()[0]}",
        key="trainer.collective_timeout_s",
        expected="ranks that start together, and reach each other at MASTER_ADDR:MASTER_PORT",
    )


def _own_device(kind: str) -> torch.device:
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(kind)
