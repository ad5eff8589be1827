"""The way of a call through the stations of its tool: one for each tool and event loop."""

import asyncio
import copy
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiolimiter import AsyncLimiter
from cachetools import LRUCache, TTLCache
from purgatory import SyncCircuitBreakerFactory
from purgatory.domain.model import CLOSED, HALF_OPENED, OpenedState
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from agentrl.errors import AgentRLError, ToolError, words_of
from agentrl.messages import ToolCall
from agentrl.plugins.call import ExecutionMode, PerLoop, contained
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import (
    BreakerSettings,
    CacheSettings,
    RetrySettings,
    ToolSettings,
)


class UnavailableError(AgentRLError, RuntimeError):
    """A tool that is not asked for now: it failed too often lately."""


@dataclass(slots=True)
class Visit:
    """One call on its way to a tool, and what it met there."""

    call: ToolCall
    execute_kwargs: Mapping[str, Any]
    gate: AbstractAsyncContextManager[None]
    """Of the request: lets through as many of its calls as can run at once."""
    attempt: Callable[["Visit"], Awaitable[ToolResult]]
    """Executes the call, once; raises what went wrong."""
    run_s: float = 0.0
    """Seconds of all attempts."""
    num_attempts: int = 0
    is_cached: bool = False
    """Whether the answer is that of an equal call."""


Way = Callable[[Visit], Awaitable[ToolResult]]
"""The rest of a call's way, to the tool."""


class Station(Protocol):
    """Lets a visit go on along the rest of its way, or not, or later, or again."""

    def __call__(self, visit: Visit, go_on: Way) -> Awaitable[ToolResult]:
        """Answer the visit's call; raises what went wrong."""
        ...


def way_of(tool: BaseTool, settings: ToolSettings) -> Way:
    """Find the way of a tool's calls on this event loop; its stations are shared by all of them.

    What `settings` says of stations counts when the first call of a loop comes.
    """
    if id(tool) not in _ways:
        _ways[id(tool)] = PerLoop(partial(_make_way, tool.name, settings))
        weakref.finalize(tool, _ways.pop, id(tool)).atexit = False
    return _ways[id(tool)].get()


def _attempt(visit: Visit) -> Awaitable[ToolResult]:
    return visit.attempt(visit)


async def _pass_gate(visit: Visit, go_on: Way) -> ToolResult:
    async with visit.gate:
        return await go_on(visit)


def _stations(name: str, settings: ToolSettings) -> Iterator[Station]:
    """Make the stations, in the order in which a call passes them.

    The libraries behind them are for those who ask for them: nobody else pays for the import.
    """
    breaker = None
    if settings.cache:
        from agentrl.tools.runtime.middleware import Cache

        yield Cache(settings.cache)
    if settings.circuit_breaker:
        from agentrl.tools.runtime.middleware import Breaker

        breaker = Breaker(name, settings.circuit_breaker)
        yield breaker.refuse
    if settings.retry and settings.retry.max_attempts > 1:
        from agentrl.tools.runtime.middleware import Retry

        yield Retry(settings.retry)
    if settings.isolation is ExecutionMode.PROCESS:
        yield _pass_gate
    if settings.max_concurrency or settings.rate_limit:
        from agentrl.tools.runtime.middleware import limits

        yield from limits(settings)
    if breaker:
        yield breaker.watch


def _make_way(name: str, settings: ToolSettings) -> Way:
    way: Way = _attempt
    for station in reversed([*_stations(name, settings)]):
        way = partial(station, go_on=way)
    return way


_ways: dict[int, PerLoop[Way]] = {}
"""By tool, of those that live: by identity, because a class of users may define equality."""


class Cache:
    """Answer equal calls once: same arguments, same `execute_kwargs`, whatever the request.

    Only results enter: a `ToolError` may have been for the moment, and a failure is nobody's
    answer. Both are told to those that waited for the call, and not kept. Each asker gets a copy
    of its own, with reward and metrics. What cannot be written as JSON, or not be copied, is not
    shared.

    Equal calls that are under way at once are made once: the first goes on, the others wait. Where
    the first is cancelled, one of the others goes in its place.
    """

    def __init__(self, settings: CacheSettings) -> None:
        size, ttl_s = settings.max_entries, settings.ttl_s
        self._kept: MutableMapping[str, ToolResult] = (
            LRUCache(size) if ttl_s is None else TTLCache(size, ttl_s)
        )
        self._under_way: dict[str, asyncio.Future[ToolResult | None]] = {}

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Answer from what is kept or under way; else go on and keep the answer."""
        key = _key_of(visit)
        if key is None:
            return await go_on(visit)
        while (kept := self._kept.get(key)) is None:
            first = self._under_way.get(key)
            if first is None:
                return await self._go_first(key, visit, go_on)
            visit.is_cached = True
            kept = await asyncio.shield(first)
            if kept is not None:
                break
            visit.is_cached = False
        visit.is_cached = True
        return contained(partial(copy.deepcopy, kept))

    async def _go_first(self, key: str, visit: Visit, go_on: Way) -> ToolResult:
        told = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            result = await go_on(visit)
        except Exception as error:
            told.set_exception(error)
            told.exception()  # perhaps nobody waits: that is no error
            raise
        else:
            self._keep(key, result, told)
            return result
        finally:
            del self._under_way[key]
            if not told.done():
                told.set_result(None)  # nothing to share: each of those who wait tries itself

    def _keep(
        self, key: str, result: ToolResult, told: "asyncio.Future[ToolResult | None]"
    ) -> None:
        try:
            kept = contained(partial(copy.deepcopy, result))
        except Exception:  # noqa: BLE001 - whatever a user's value raises in copying
            return
        self._kept[key] = kept
        told.set_result(kept)


def _key_of(visit: Visit) -> str | None:
    """Write a call as canonical JSON; None where that would not say it all."""
    asked = [visit.call.function.arguments, dict(visit.execute_kwargs)]
    try:
        text = json.dumps(asked, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    # Tuples, and keys that are no strings, come back as something else.
    return text if json.loads(text) == asked else None


class Breaker:
    """Open after `max_failures` failed attempts in a row; after `reset_s`, try with one call.

    The states, their counts and times are the library's. Added here: while one call tries, the
    others are refused, and what began before the breaker opened no longer decides; a call that is
    cancelled says nothing, so that the next one tries. A `ToolError` is an answer: the tool works.

    Two stations: `refuse` before the queues, `watch` behind them.
    """

    def __init__(self, name: str, settings: BreakerSettings) -> None:
        self._name = name
        factory = SyncCircuitBreakerFactory(settings.max_failures, settings.reset_s)
        self._circuit = factory.get_breaker(name)
        self._is_tried = False
        """Whether the one call that tries is under way."""

    async def refuse(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on, unless the breaker is open.

        Raises:
            UnavailableError: where it is.
        """
        self._knock()
        return await go_on(visit)

    async def watch(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on, unless the breaker is open, and note how it ends.

        Raises:
            UnavailableError: where it is.
        """
        self._knock()
        tries = self._is_tried = self._circuit.context.state == HALF_OPENED
        try:
            result = await go_on(visit)
        except ToolError:
            self._note(None, tries=tries)
            raise
        except Exception as error:
            self._note(error, tries=tries)
            raise
        else:
            self._note(None, tries=tries)
            return result
        finally:
            if tries:
                self._is_tried = False

    def _knock(self) -> None:
        if self._is_tried:
            raise UnavailableError(f"tool {self._name!r} is just being tried again")
        try:
            self._circuit.__enter__()
        except OpenedState:
            raise UnavailableError(f"tool {self._name!r} failed too often lately") from None

    def _note(self, failure: Exception | None, *, tries: bool) -> None:
        if tries or self._circuit.context.state == CLOSED:
            self._circuit.__exit__(type(failure) if failure else None, failure, None)


logger = logging.getLogger(__name__)


class Retry:
    """Repeat what crashed or was late, after a growing pause with a random part.

    Never behind a `ToolError`, which is an answer. Each attempt goes through the rest of the way
    anew: it queues, and has the whole time-out.
    """

    def __init__(self, settings: RetrySettings) -> None:
        self._stop = stop_after_attempt(settings.max_attempts)
        self._wait = wait_exponential_jitter(
            multiplier=settings.wait_initial_s,
            max=settings.wait_max_s,
            jitter=settings.wait_jitter_s,
        )

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on until it is answered, or the attempts are used up.

        Raises:
            Exception: of the last attempt that was made.
        """
        last: list[Exception] = []

        def is_worth_another(error: BaseException) -> bool:
            if isinstance(error, ToolError | UnavailableError) or not isinstance(error, Exception):
                return False
            last[:] = [error]
            place = visit.call.function.name, visit.call.id, visit.num_attempts
            logger.info("tool %r, call %s, attempt %d: %s", *place, words_of(error))
            return True

        async def attempt() -> ToolResult:
            return await go_on(visit)

        # One for each visit: it counts as it goes.
        attempts = AsyncRetrying(
            stop=self._stop,
            wait=self._wait,
            retry=retry_if_exception(is_worth_another),
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except UnavailableError as refusal:
            # The attempts before opened the breaker: their failure is what happened to this call.
            raise (last or [refusal])[0] from None


def limits(settings: ToolSettings) -> Iterator[Station]:
    """Make the stations of the limits that there are."""
    if settings.max_concurrency:
        yield Places(settings.max_concurrency)
    if settings.rate_limit:
        yield Pace(settings.rate_limit.calls, settings.rate_limit.per_s)


class Places:
    """Let so many calls run at once; the others queue, first come, first served.

    A call that ignores its time-out is left behind, and no longer counts.
    """

    def __init__(self, number: int) -> None:
        self._places = asyncio.Semaphore(number)

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Wait for a place, and hold it until the call has ended."""
        async with self._places:
            return await go_on(visit)


class Pace:
    """Let so many calls begin at once, and each further one as the period goes by (leaky bucket).

    Args:
        calls: How many.
        per_s: The period, in seconds.
    """

    def __init__(self, calls: float, per_s: float) -> None:
        self._limiter = AsyncLimiter(calls, per_s)

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Wait for the call's time."""
        await self._limiter.acquire()
        return await go_on(visit)
