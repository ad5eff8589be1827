"""Schedule the requests of a rollout: all at once up to a limit, or in lock-step rounds.

A forward pass rounds by the rows that share it. So the last bits of a result depend on which other
requests the engine computes at the same time, and therefore on how long their tools took.
`LockstepScheduler` (`rollout.deterministic`) makes that a function of the requests alone. While a
tool or a simulated user of any request works, nothing is generated. Then the engine calls of all
requests start at once, in the order of the requests, and all results are returned together:

    turn 1 of all  ->  tools, users  ->  turn 2 of the rest  ->  tools, users  ->  ...

The price is waiting: a round lasts as long as its longest completion and its slowest tool.
"""

import asyncio
import gc
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, Self

from agentrl.engines.protocol import (
    Completion,
    CompletionSource,
    Engine,
    EngineCall,
    SamplingParams,
)
from agentrl.errors import EngineError, RolloutError
from agentrl.media.records import MediaSpan

_LOCKSTEP_ENGINES: set[int] = set()
"""Ids of the engine objects that deterministic rollouts are using."""


class Scheduler(Protocol):
    """Admits the requests of one rollout in their order, up to a limit."""

    def admit(self, index: int) -> AbstractAsyncContextManager[CompletionSource]:
        """Wait until the request at `index` may run; its slot is free again after the block.

        The value of the block generates the completions of the request.
        """
        ...


class ConcurrentScheduler:
    """Runs each request as fast as possible, independently of the others.

    Args:
        engine: Generates every completion.
        capacity: Maximum number of requests at once.
    """

    def __init__(self, engine: Engine, *, capacity: int) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(capacity)

    @asynccontextmanager
    async def admit(self, index: int) -> AsyncIterator[CompletionSource]:
        """Wait for a free slot."""
        async with self._slots:
            yield self._engine


@dataclass(eq=False, slots=True)
class _WaitingCall:
    """A call that waits for its round, and then for its result."""

    call: EngineCall
    result: asyncio.Future[Completion | BaseException]


class LockstepScheduler:
    """Generates in rounds; an async context manager that clears the engine's prefix cache on entry.

    A request that was admitted is a member. The next round starts as soon as every member waits in
    `generate`. A request that ends frees its slot within the same step of the event loop, so no
    round can start in between: the members of each round depend only on the requests.

    If a member is cancelled during its round (by its time limit, for example), its call is aborted
    in the engine. The other calls continue in a batch with one row less, from a moment that depends
    on the clock.

    Args:
        engine: Generates the completions. Only one `LockstepScheduler` may use it at a time; a
            second one raises `RolloutError`.
        num_requests: Number of requests of the rollout. Their indices are 0, 1, ...
        capacity: Maximum number of members at once.
    """

    def __init__(self, engine: Engine, *, num_requests: int, capacity: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._queue = deque(range(num_requests))
        self._admitted = [asyncio.Event() for _ in range(num_requests)]
        self._members: set[int] = set()
        self._waiting: dict[int, _WaitingCall] = {}
        self._round: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if id(self._engine) in _LOCKSTEP_ENGINES:
            raise RolloutError(
                "another deterministic rollout is using the engine",
                expected="one after the other, or `rollout.deterministic: false`",
            )
        _LOCKSTEP_ENGINES.add(id(self._engine))
        try:
            # A resumed run starts with an empty cache, so this one must, too.
            await self._engine.flush_cache()
        except BaseException:
            _LOCKSTEP_ENGINES.discard(id(self._engine))
            raise
        self._admit_next()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._round is not None:
                self._round.cancel()
                with suppress(asyncio.CancelledError):
                    await self._round
        finally:
            _LOCKSTEP_ENGINES.discard(id(self._engine))

    @asynccontextmanager
    async def admit(self, index: int) -> AsyncIterator[CompletionSource]:
        """Wait until the request at `index` is a member."""
        try:
            await self._admitted[index].wait()
            yield _Member(self, index)
        finally:
            if index in self._members:
                self._members.remove(index)
            else:
                self._queue.remove(index)
            self._admit_next()
            self._start_round_if_all_wait()

    async def complete(self, index: int, call: EngineCall) -> Completion:
        """Generate a completion for a member in the next round.

        Raises:
            BaseException: The error of the call.
        """
        waiting = _WaitingCall(call, asyncio.get_running_loop().create_future())
        self._waiting[index] = waiting
        self._start_round_if_all_wait()
        try:
            result = await waiting.result
        except asyncio.CancelledError:
            if self._waiting.pop(index, None) is None:
                await self._engine.abort(call.request_id)
            raise
        if isinstance(result, BaseException):
            raise result
        return result

    def _admit_next(self) -> None:
        while self._queue and len(self._members) < self._capacity:
            index = self._queue.popleft()
            self._members.add(index)
            self._admitted[index].set()

    def _start_round_if_all_wait(self) -> None:
        if self._round is None and self._waiting and len(self._waiting) == len(self._members):
            calls = [self._waiting[index] for index in sorted(self._waiting)]
            self._waiting.clear()
            self._round = asyncio.create_task(self._run_round(calls), name="round")

    async def _run_round(self, waiting: Sequence[_WaitingCall]) -> None:
        try:
            results = await self._engine.generate_together([w.call for w in waiting])
            if len(results) != len(waiting):
                raise EngineError(
                    f"the engine returned {len(results)} results", expected=f"{len(waiting)}"
                )
        # Every member of the round must get the error, even a stray cancellation.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            results = [error] * len(waiting)
        self._round = None
        for member, result in zip(waiting, results, strict=True):
            if not member.result.done():
                member.result.set_result(result)
        self._start_round_if_all_wait()


class _Member:
    """The `CompletionSource` of one member."""

    def __init__(self, scheduler: LockstepScheduler, index: int) -> None:
        self._scheduler = scheduler
        self._index = index

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Continue `input_ids` in the next round; one call at a time."""
        call = EngineCall(
            input_ids=input_ids, sampling=sampling, request_id=request_id, media=media
        )
        return await self._scheduler.complete(self._index, call)


GC_THRESHOLD = 500_000
"""Allocations between two garbage collections: those of about 4,500 requests."""

_gc_lock = threading.Lock()
_gc_blocks: list[tuple[int, int, int]] = []
"""The thresholds at the entry of each open block of `rare_gc`."""


@contextmanager
def rare_gc() -> Iterator[None]:
    """Raise the first threshold of the garbage collector within the block, for the whole process.

    The objects of a rollout live until its end, so a collection during the rollout finds nothing.
    With Python's defaults a rollout of 512 requests causes about 300 collections, and each full one
    visits all objects of the program. Objects without reference cycles are still freed at once.

    The last of several overlapping blocks restores the thresholds, unless the program has changed
    them meanwhile. Higher thresholds, and 0 (off), are not changed.
    """
    with _gc_lock:
        _gc_blocks.append(_gc_blocks[0] if _gc_blocks else gc.get_threshold())
        young, middle, old = _gc_blocks[0]
        raised = (max(young, GC_THRESHOLD) if young else 0, middle, old)
        if len(_gc_blocks) == 1:
            gc.set_threshold(*raised)
    try:
        yield
    finally:
        with _gc_lock:
            before = _gc_blocks.pop()
            if not _gc_blocks and gc.get_threshold() == raised:
                gc.set_threshold(*before)
