"""The ranks of a run, and the exchange of small objects between them.

A run without torchrun is a world of one rank: its process group uses an in-memory store and opens
no port, and every exchange below is the identity.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import ConfigError, RankError
from agentrl.workers.memory import keep_freed_memory
from agentrl.workers.rank_status import RankStatus, is_failed_collective, open_rank_status
from agentrl.workers.sequence_parallel import SequenceShard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, `dp`: all ranks shard the weights and split the rows."""
    status: RankStatus
    """What each rank does, for the error if one does not come."""
    sequence_group: "dist.ProcessGroup | None" = None
    """The ranks that compute the same rows together, each a part of their tokens; None: this rank
    computes its rows alone."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and logs."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks that compute the same rows together."""
        return 1 if self.sequence_group is None else self.sequence_group.size()

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups; the ranks of one group compute the same rows."""
        return self.size // self.ranks_per_sequence

    @property
    def reports_rows(self) -> bool:
        """Whether sums over rows count those of this rank: once for each data-parallel group."""
        return self.sequence_group is None or self.sequence_group.rank() == 0

    def sequence_shard(self, num_tokens: int) -> SequenceShard | None:
        """Return this rank's part of a micro-batch of packed tokens; None: all of it."""
        group = self.sequence_group
        if group is None:
            return None
        return SequenceShard(group, group.rank(), group.size(), num_tokens)

    def with_sequence_groups(self, size: int) -> "World":
        """Return the world in which every `size` ranks compute the same rows. A collective.

        Raises:
            ConfigError: if the number of ranks is not a multiple of `size`.
        """
        if size == 1:
            return self
        if self.size % size:
            raise ConfigError(
                f"{self.size} ranks cannot be divided into groups of {size}",
                key="actor.ulysses_sequence_parallel_size",
                expected="a divisor of the number of ranks",
            )
        groups = [
            dist.new_group(list(range(first, first + size))) for first in range(0, self.size, size)
        ]
        return replace(self, sequence_group=groups[self.rank // size])

    @property
    def dp_rank(self) -> int:
        """Index of this rank's data-parallel group; a group's ranks follow each other."""
        return self.rank * self.dp_size // self.size

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
        """The device of exchanged tensors: the CPU, unless the process group is NCCL's alone."""
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

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each rank, and return the rows that this rank receives.

        Args:
            rows: `[b, ...]`, sorted by the rank that gets them.
            sent: Number of rows for each rank.
            received: Number of rows from each rank; the result has them in this order.
        """
        outgoing = rows.to(self._carrier).contiguous()
        incoming = outgoing.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(incoming, outgoing, list(received), list(sent))
        return incoming.to(rows.device)

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Wait for all ranks at the end of the block, and raise on all of them if one raised.

        For work without collectives: otherwise the ranks would wait for one that failed until the
        timeout. The wait is a collective. Errors that end a process (Ctrl-C) skip it.

        Raises:
            RankError: if another rank raised.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, on all ranks
            failure = error
        if not self.is_alone:
            wait = "the wait after "
            self.status.enter(wait + self.status.stage.removeprefix(wait))
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        for rank, text in enumerate(texts):
            if failure is None and text is not None:
                failure = RankError(f"rank {rank} failed: {text}")
        if failure is not None:
            self.status.shared_error = failure
            raise failure


def start_world(device: str, *, timeout_s: float) -> World:
    """Join the ranks that torchrun started, or make a world of one rank.

    An existing process group is used as it is. On a CPU, the process keeps memory that it freed.

    Args:
        device: `auto`, `cpu` or `cuda`.
        timeout_s: Seconds that one collective, or joining, may take. A rank that waits longer
            raises an error.

    Raises:
        ConfigError: if `device` is `cuda` and there is none.
        RankError: if the other ranks do not join.
    """
    kind = resolve_device(device)
    if kind == "cpu":
        keep_freed_memory()
    store = None
    if not dist.is_initialized():
        try:
            store = _init_process_group(kind, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if not is_failed_collective(error):
                raise
            rank, size = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
            raise RankError(
                f"rank {rank} of {size} could not join the others within {timeout_s:g} s: "
                f"{str(error).splitlines()[0]}",
                key="trainer.collective_timeout_s",
                expected="ranks that start together, and reach each other at "
                "MASTER_ADDR:MASTER_PORT",
            ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(
        rank=rank,
        size=size,
        device=_own_device(kind),
        mesh=init_device_mesh(kind, (size,), mesh_dim_names=("dp",)),
        status=open_rank_status(store, rank=rank, size=size, timeout_s=timeout_s),
    )


def stop_world() -> None:
    """Leave the process group; may be called twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def resolve_device(device: str) -> str:
    """Resolve `auto` to the kind of device that is available.

    Raises:
        ConfigError: if `device` is `cuda` and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cuda, and torch finds no CUDA device",
            key="trainer.device",
            expected="auto or cpu on this machine",
        )
    return device


def _init_process_group(kind: str, timeout: timedelta) -> Any:
    """Join the ranks, and return their store."""
    if kind == "cuda":
        torch.cuda.set_device(_own_device(kind))
        # It makes a plan for each shape, which takes longer than the attention of one sequence.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        backend = "nccl" if kind == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return store
    # Objects are exchanged by gloo on any device: its timeouts raise an error, and NCCL's watchdog
    # would end the process without one.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return store


def _own_device(kind: str) -> torch.device:
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(kind)
