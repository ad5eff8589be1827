"""Who of a rollout's requests runs when: as there is room, or in rounds that no latency changes.

A forward pass rounds by the rows that share it, so the last bits of a request depend on which other
requests the engine happens to compute beside it: on how long their tools took. `LockstepScheduler`
(`rollout.deterministic`) makes that a function of the requests alone. Nothing is generated while a
tool or a simulated user of any request is at work; then the calls of all begin at once, in the
order of the requests, and none is answered until all have ended:

    turn 1 of all  ->  tools, users  ->  turn 2 of all that go on  ->  tools, users  ->  ...

What it costs is waiting: a round lasts as long as its longest completion and its slowest tool.
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

_ENGINES_IN_ROUNDS: set[int] = set()
"""Identities of the engines that a deterministic rollout uses now."""


class Scheduler(Protocol):
    """Lets the requests of one rollout in, so many at once, in their order."""

    def admit(self, place: int) -> AbstractAsyncContextManager[CompletionSource]:
        """Wait until the request at `place` may run; its room is free behind the block.

        Gives what completes the request's turns.
        """
        ...


class ConcurrentScheduler:
    """Each request runs as fast as it can, whatever the others do.

    Args:
        engine: Completes every turn.
        capacity: Requests at once.
    """

    def __init__(self, engine: Engine, *, capacity: int) -> None:
        self._engine = engine
        self._capacity = asyncio.Semaphore(capacity)

    @asynccontextmanager
    async def admit(self, place: int) -> AsyncIterator[CompletionSource]:
        """Wait for room."""
        async with self._capacity:
            yield self._engine


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for its round, and then for its answer."""

    call: EngineCall
    answer: asyncio.Future[Completion | BaseException]


class LockstepScheduler:
    """Generation in rounds; an async context manager that drops the engine's prefixes on entry.

    A member is a request that has its admit. The next round begins as soon as every member waits in
    `generate`. Whoever leaves hands its admit on within the same step of the event loop, so that no
    round can begin between the two: who takes part in which round depends on the requests alone.

    A member that is cancelled in its round (its wall clock, say) is aborted in the engine; the
    others go on, by a batch that has one row less from a moment that the clock chose.

    Args:
        engine: Completes the turns. A second `LockstepScheduler` on it is refused
            with a `RolloutError`.
        num_requests: Requests of the rollout, by place 0, 1, ...
        capacity: Members at once.
    """

    def __init__(self, engine: Engine, *, num_requests: int, capacity: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._queue = deque(range(num_requests))
        self._admitted = [asyncio.Event() for _ in range(num_requests)]
        self._members: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._round: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._claim_engine()
        try:
            # A resumed run begins with an empty cache, and must find what this one finds.
            await self._engine.flush_cache()
        except BaseException:
            _ENGINES_IN_ROUNDS.discard(id(self._engine))
            raise
        self._admit()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._round is not None:
                self._round.cancel()
                with suppress(asyncio.CancelledError):
                    await self._round
        finally:
            _ENGINES_IN_ROUNDS.discard(id(self._engine))

    def _claim_engine(self) -> None:
        if id(self._engine) in _ENGINES_IN_ROUNDS:
            raise RolloutError(
                "a deterministic rollout on an engine that another one is using",
                expected="one after the other, or `rollout.deterministic: false`",
            )
        _ENGINES_IN_ROUNDS.add(id(self._engine))

    @asynccontextmanager
    async def admit(self, place: int) -> AsyncIterator[CompletionSource]:
        """Wait until the request at `place` is a member."""
        try:
            await self._admitted[place].wait()
            yield _Slot(self, place)
        finally:
            self._leave(place)

    async def complete(self, place: int, call: EngineCall) -> Completion:
        """Complete a member's turn in the next round.

        Raises:
            BaseException: what the call failed with.
        """
        waiting = _Waiting(call, asyncio.get_running_loop().create_future())
        self._waiting[place] = waiting
        self._begin_where_all_wait()
        try:
            answer = await waiting.answer
        except asyncio.CancelledError:
            await self._withdraw(place, call)
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _withdraw(self, place: int, call: EngineCall) -> None:
        if self._waiting.pop(place, None) is None:
            await self._engine.abort(call.request_id)

    def _admit(self) -> None:
        while self._queue and len(self._members) < self._capacity:
            place = self._queue.popleft()
            self._members.add(place)
            self._admitted[place].set()

    def _leave(self, place: int) -> None:
        if place in self._members:
            self._members.remove(place)
        else:
            self._queue.remove(place)
        self._admit()
        self._begin_where_all_wait()

    def _begin_where_all_wait(self) -> None:
        if self._round is None and self._waiting and len(self._waiting) == len(self._members):
            calls = [self._waiting[place] for place in sorted(self._waiting)]
            self._waiting.clear()
            self._round = asyncio.create_task(self._run(calls), name="round")

    async def _run(self, waiting: Sequence[_Waiting]) -> None:
        try:
            answers = await self._engine.generate_together([w.call for w in waiting])
            if len(answers) != len(waiting):
                raise EngineError(
                    f"the engine gave {len(answers)} answers", expected=f"{len(waiting)}"
                )
        # Whatever it is, even a stray cancellation, every member of the round is to hear of it.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            answers = [error] * len(waiting)
        self._round = None
        for member, answer in zip(waiting, answers, strict=True):
            if not member.answer.done():
                member.answer.set_result(answer)
        self._begin_where_all_wait()


class _Slot:
    """One member's view of the rounds."""

    def __init__(self, rounds: LockstepScheduler, place: int) -> None:
        self._rounds = rounds
        self._place = place

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids` in the next round; one call at a time."""
        call = EngineCall(input_ids=input_ids, sampling=sampling, request_id=request_id)
        return await self._rounds.complete(self._place, call)


ALLOCATIONS = 500_000
"""Objects that may come into being between two searches: those of some 4,500 requests."""


class _Guests:
    """Those who asked for rare searches, and the thresholds of the program that they run in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._host: tuple[int, int, int] = gc.get_threshold()

    def come(self) -> None:
        with self._lock:
            if not self._number:
                self._host = gc.get_threshold()
                gc.set_threshold(*_rarer(self._host))
            self._number += 1

    def go(self) -> None:
        with self._lock:
            self._number -= 1
            # Thresholds that the program has set meanwhile are the ones that it wants.
            if not self._number and gc.get_threshold() == _rarer(self._host):
                gc.set_threshold(*self._host)


def _rarer(thresholds: tuple[int, int, int]) -> tuple[int, int, int]:
    """Our thresholds; those of a program that searches more rarely yet, or never (0), stay."""
    young, middle, old = thresholds
    return (max(young, ALLOCATIONS) if young else 0, middle, old)


_GUESTS = _Guests()


@contextmanager
def rare_gc() -> Iterator[None]:
    """Raise the garbage collector's first threshold within the block, for the whole process.

    Behind the last of several such blocks that overlap, the thresholds are those from before.
    """
    _GUESTS.come()
    try:
        yield
    finally:
        _GUESTS.go()
