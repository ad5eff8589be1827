"""Roll the soak's work out, and count what is held before, meanwhile and after."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import psutil
from soak_work import Sizes, Work

from agentrl.rollout import AsyncRolloutRequest


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds."""

    descriptors: int
    processes: int
    threads: int
    tasks: int

    @classmethod
    def now(cls) -> "Holdings":
        """Count; called on the event loop."""
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            processes=len(psutil.Process().children(recursive=True)),
            threads=threading.active_count(),
            tasks=len(asyncio.all_tasks()),
        )


async def settle(before: Holdings | None = None) -> Holdings:
    """Count again until nothing is left over, for at most five seconds.

    Threads of calls that were given up end behind the processes that they waited for.
    """
    gc.collect()
    for _ in range(50):
        if before is None or Holdings.now() == before:
            break
        await asyncio.sleep(0.1)
    return Holdings.now()


@dataclass(frozen=True, slots=True)
class Soaked:
    """What was found."""

    finished: Sequence[AsyncRolloutRequest]
    wall_s: float
    bound_s: float
    before: Holdings
    most: Holdings
    after: Holdings
    memory_bytes: tuple[int, int, int]
    """Before, at the peak, and after."""

    @property
    def ratio(self) -> float:
        """Wall time over the bound."""
        return self.wall_s / self.bound_s


class Watch:
    """Notes the most that is held, several times a second; an async context manager."""

    def __init__(self) -> None:
        self._seen: list[Holdings] = []
        self._memory: list[int] = []

    async def __aenter__(self) -> "Watch":
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _look(self) -> None:
        while True:
            self._seen.append(Holdings.now())
            self._memory.append(psutil.Process().memory_info().rss)
            await asyncio.sleep(0.25)

    @property
    def most(self) -> Holdings:
        """The most of each, at any time."""
        return Holdings(*map(max, zip(*map(astuple, self._seen), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """The most resident memory, at any time."""
        return max(self._memory)


async def soak(work: Work) -> Soaked:
    """Roll everything out; something must have been rolled out before.

    Raises:
        AssertionError: where anything came out that was not drawn.
    """
    before, memory = await settle(), psutil.Process().memory_info().rss
    async with Watch() as watch:
        started = time.perf_counter()
        finished = await work.manager.drive(work.requests)
        wall_s = time.perf_counter() - started
    work.check(finished)
    return Soaked(
        finished=finished,
        wall_s=wall_s,
        bound_s=work.bound_s(),
        before=before,
        most=watch.most,
        after=await settle(before),
        memory_bytes=(memory, watch.peak_bytes, psutil.Process().memory_info().rss),
    )


async def lone_process_s(work: Work) -> float:
    """Seconds that a request takes for its process, where one runs after another."""
    started = time.perf_counter()
    work.check(await work.manager.drive(work.requests))
    return (time.perf_counter() - started - sum(work.waits())) / work.sizes.requests


async def run(tokenizer: str, sizes: Sizes, folder: Path) -> tuple[Work, Soaked, float]:
    """Warm up with a few requests that nothing happens to, then soak."""
    calm = replace(sizes, slots=1, faults={})
    lone_s = 0.0
    for number in (1, 20):  # the first starts what serves all others
        few = Work(tokenizer, folder / f"calm{number}", replace(calm, requests=number))
        lone_s = await lone_process_s(few)
    work = Work(tokenizer, folder / "soak", sizes)
    return work, await soak(work), lone_s
