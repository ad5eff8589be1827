"""Two ranks as torchrun would start them, each in a process of its own."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tests.fakes.forker import ROOT, ForkedProgram


@dataclass(frozen=True)
class RankOutput:
    """What a rank left behind."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Rank:
    """A rank that runs."""

    process: ForkedProgram

    def wait(self, timeout_s: float = 150) -> RankOutput:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return RankOutput(self.process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank, and one thread for each."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@contextmanager
def ranks_of(
    module: str, *arguments: str, size: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[list[Rank]]:
    """Start a module on each rank; whatever still runs behind the block is killed."""
    port = free_port()
    common = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {})
    ranks = [
        Rank(
            ForkedProgram(
                module, *arguments, environment=common | rank_environment(rank, size, port)
            )
        )
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
