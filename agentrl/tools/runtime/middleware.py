"""Wrap the calls of a tool as its `config` asks: cache, circuit breaker, retry and limits.

A call passes the middleware in this order. What `config` does not name is left out; a call of a
tool that names nothing goes to the tool directly.

    slot of the request (max_parallel_calls)
      |
    cache ............. returns a stored answer, or waits for an equal call that is running
      |
    circuit breaker ... if open: `unavailable` at once
      |
    retry  <--------+.. after a crash or a time-out: pause, then run all of the following again
      |             |
    request lock    |.. isolation: process: the calls of one request run one after another
      |             |
    max_concurrency |.. limits the calls of all requests that run at once
      |             |
    rate_limit      |.. limits the calls of all requests that start in a period
      |             |
    circuit breaker |.. may have opened in the meantime; counts how the attempt ends
      |             |
    execute --------+.. timeout_s starts here, for each attempt

A cached answer therefore needs no capacity, and is returned even while the service is down. No call
queues for a service that is down. A call that pauses holds no capacity. No time-out runs in a
queue. When a call ends, fails or is cancelled, each middleware gives back what it holds.

All requests of a rank share the middleware: there is one chain for each tool object and event loop.
"""

import asyncio
import copy
import json
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentrl.errors import AgentRLError, ToolError, words_of
from agentrl.messages import ToolCall
from agentrl.plugins.call import ExecutionMode, PerLoop, contained
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import (
    BreakerSettings,
    CacheSettings,
    RateSettings,
    RetrySettings,
    ToolSettings,
)

logger = logging.getLogger(__name__)


class UnavailableError(AgentRLError, RuntimeError):
    """A call was refused, because the tool failed too often."""


@dataclass(slots=True)
class CallContext:
    """One call on its way to a tool, and what is recorded about it."""

    call: ToolCall
    execute_kwargs: Mapping[str, Any]
    request_lock: AbstractAsyncContextManager[None]
    """Limits the calls of this request that run at once, if the executor needs that."""
    attempt: Callable[["CallContext"], Awaitable[ToolResult]]
    """Executes the call once. Raises the error of the attempt."""
    run_s: float = 0.0
    """Seconds of all attempts."""
    num_attempts: int = 0
    is_cached: bool = False
    """Whether the answer is the answer of an equal call."""


Handler = Callable[[CallContext], Awaitable[ToolResult]]
"""Answers a call: the tool, with the middleware that is still to pass."""


class Middleware(Protocol):
    """Answers a call: by the next handler, at once, later, again, or not at all."""

    def __call__(self, context: CallContext, next_handler: Handler) -> Awaitable[ToolResult]:
        """Answer the call, or raise its error."""
        ...


_handlers: dict[int, PerLoop[Handler]] = {}
"""By `id(tool)`, for tools that exist: a class of users may define its own equality."""


def handler_of(tool: BaseTool, settings: ToolSettings) -> Handler:
    """Return the chain of a tool on this event loop.

    The first call on a loop makes the chain, with the settings of that moment.
    """
    if id(tool) not in _handlers:
        _handlers[id(tool)] = PerLoop(partial(_make_handler, tool.name, settings))
        weakref.finalize(tool, _handlers.pop, id(tool)).atexit = False
    return _handlers[id(tool)].get()


def _make_handler(name: str, settings: ToolSettings) -> Handler:
    handler: Handler = _attempt
    for middleware in reversed([*_middleware(name, settings)]):
        handler = partial(middleware, next_handler=handler)
    return handler


def _middleware(name: str, settings: ToolSettings) -> Iterator[Middleware]:
    """Make the middleware, in the order in which a call passes it."""
    breaker = settings.circuit_breaker and CircuitBreaker(name, settings.circuit_breaker)
    if settings.cache:
        yield Cache(settings.cache)
    if breaker:
        yield breaker.refuse
    if settings.retry and settings.retry.max_attempts > 1:
        yield partial(retry, settings.retry)
    if settings.isolation is ExecutionMode.PROCESS:
        yield _hold_request_lock
    if settings.max_concurrency:
        yield partial(_hold, asyncio.Semaphore(settings.max_concurrency))
    if settings.rate_limit:
        yield RateLimit(settings.rate_limit)
    if breaker:
        yield breaker.observe


def _attempt(context: CallContext) -> Awaitable[ToolResult]:
    return context.attempt(context)


async def _hold_request_lock(context: CallContext, next_handler: Handler) -> ToolResult:
    async with context.request_lock:
        return await next_handler(context)


async def _hold(
    semaphore: asyncio.Semaphore, context: CallContext, next_handler: Handler
) -> ToolResult:
    """Run at most `max_concurrency` calls at once; the others queue in order of arrival.

    A call that ignores its time-out is abandoned, and no longer counts.
    """
    async with semaphore:
        return await next_handler(context)


class RateLimit:
    """Start at most `calls` calls in each period of `per_s` seconds, on average (leaky bucket)."""

    def __init__(self, settings: RateSettings) -> None:
        from aiolimiter import AsyncLimiter

        self._limiter = AsyncLimiter(settings.calls, settings.per_s)

    async def __call__(self, context: CallContext, next_handler: Handler) -> ToolResult:
        """Wait until the call may start."""
        await self._limiter.acquire()
        return await next_handler(context)


class Cache:
    """Answer equal calls once: same arguments and same `execute_kwargs`, in any request.

    Only results are stored. A `ToolError` may be temporary, and a failure is no answer: the calls
    that wait for the same answer get the error, and it is not stored. Each caller gets a copy of
    its own, with reward and metrics. A call that JSON cannot represent, and a result that cannot be
    copied, are not shared.

    Equal calls that run at once are executed once: the first one runs, the others wait. If the
    first one is cancelled, one of the others runs instead.
    """

    def __init__(self, settings: CacheSettings) -> None:
        from cachetools import LRUCache, TTLCache

        size, ttl_s = settings.max_entries, settings.ttl_s
        self._stored: MutableMapping[str, ToolResult] = (
            LRUCache(size) if ttl_s is None else TTLCache(size, ttl_s)
        )
        self._running: dict[str, asyncio.Future[ToolResult | None]] = {}

    async def __call__(self, context: CallContext, next_handler: Handler) -> ToolResult:
        """Return the stored answer, or the answer of an equal call that runs, or a new one."""
        key = _cache_key(context)
        if key is None:
            return await next_handler(context)
        while (stored := self._stored.get(key)) is None:
            if key not in self._running:
                return await self._run_first(key, context, next_handler)
            context.is_cached = True
            stored = await asyncio.shield(self._running[key])
            if stored is not None:
                break
            context.is_cached = False
        context.is_cached = True
        return contained(partial(copy.deepcopy, stored))

    async def _run_first(self, key: str, context: CallContext, next_handler: Handler) -> ToolResult:
        shared = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            result = await next_handler(context)
        except Exception as error:
            shared.set_exception(error)
            shared.exception()  # marks it as retrieved: perhaps no call waits
            raise
        else:
            try:
                self._stored[key] = contained(partial(copy.deepcopy, result))
                shared.set_result(self._stored.get(key))
            except Exception:  # noqa: BLE001 - copying runs code of users
                logger.debug("an answer of %r cannot be shared", context.call.function.name)
            return result
        finally:
            del self._running[key]
            if not shared.done():
                shared.set_result(None)  # nothing to share: each call that waits tries itself


def _cache_key(context: CallContext) -> str | None:
    """Write a call as canonical JSON; None if JSON cannot represent the call completely."""
    key = [context.call.function.arguments, dict(context.execute_kwargs)]
    try:
        text = json.dumps(key, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    # JSON turns tuples into lists, and keys that are no strings into strings.
    return text if json.loads(text) == key else None


async def retry(settings: RetrySettings, context: CallContext, next_handler: Handler) -> ToolResult:
    """Repeat a call that crashed or timed out, after a pause that grows and has a random part.

    A `ToolError` is an answer, and is not repeated. Each attempt passes the rest of the middleware
    again: it queues, and has the whole time-out.

    Raises:
        Exception: the error of the last attempt. If the attempts opened the circuit breaker, that
            is the failure before the refusal.
    """
    failure: Exception | None = None
    attempt = 0
    while True:
        attempt += 1
        try:
            return await next_handler(context)
        except ToolError:
            raise
        except UnavailableError as refusal:
            raise failure or refusal from None
        except Exception as error:
            failure = error
            name, call_id = context.call.function.name, context.call.id
            logger.info("tool %r, call %s, attempt %d: %s", name, call_id, attempt, words_of(error))
            if attempt >= settings.max_attempts:
                raise
        await asyncio.sleep(settings.pause_s(attempt))


class CircuitBreaker:
    """Refuse calls after `max_failures` failed attempts in a row; after `reset_s`, try one call.

    While that call runs, the others are refused. If it fails, the breaker stays open for another
    `reset_s`; if it succeeds, the breaker closes; if it is cancelled, the next call is the trial.
    Calls that started before the breaker opened no longer change its state. A `ToolError` is an
    answer of a tool that works.

    It is in the chain twice: `refuse` before the queues, `observe` after them.
    """

    def __init__(self, name: str, settings: BreakerSettings) -> None:
        self._name = name
        self._settings = settings
        self._num_failures = 0
        """Failures in a row."""
        self._open_until: float | None = None
        """Time of the next trial, by the monotonic clock; None if the breaker is closed."""
        self._is_trial_running = False

    async def refuse(self, context: CallContext, next_handler: Handler) -> ToolResult:
        """Pass the call on, unless the breaker is open.

        Raises:
            UnavailableError: if it is open.
        """
        self._check()
        return await next_handler(context)

    async def observe(self, context: CallContext, next_handler: Handler) -> ToolResult:
        """Pass the call on, unless the breaker is open, and count how it ends.

        Raises:
            UnavailableError: if it is open.
        """
        self._check()
        is_trial = self._is_trial_running = self._open_until is not None
        has_failed: bool | None = None  # None: the call was cancelled
        try:
            result = await next_handler(context)
            has_failed = False
            return result
        except Exception as error:
            has_failed = not isinstance(error, ToolError)
            raise
        finally:
            if is_trial:
                self._is_trial_running = False
            if has_failed is not None and (is_trial or self._open_until is None):
                self._count(has_failed)

    def _check(self) -> None:
        if self._is_trial_running:
            raise UnavailableError(f"tool {self._name!r} failed too often; a trial call is running")
        if self._open_until is not None and time.monotonic() < self._open_until:
            raise UnavailableError(f"tool {self._name!r} failed too often in a row")

    def _count(self, has_failed: bool) -> None:
        self._num_failures = self._num_failures + 1 if has_failed else 0
        is_open = self._num_failures >= self._settings.max_failures
        self._open_until = time.monotonic() + self._settings.reset_s if is_open else None
