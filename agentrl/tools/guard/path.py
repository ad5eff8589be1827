"""The way of a call through the stations of its tool: one for each tool and event loop."""

import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agentrl.errors import AgentRLError
from agentrl.messages import ToolCall
from agentrl.plugins.call import ExecutionMode, PerLoop
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.settings import ToolSettings


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
        from agentrl.tools.guard.cache import Cache

        yield Cache(settings.cache)
    if settings.circuit_breaker:
        from agentrl.tools.guard.breaker import Breaker

        breaker = Breaker(name, settings.circuit_breaker)
        yield breaker.refuse
    if settings.retry and settings.retry.max_attempts > 1:
        from agentrl.tools.guard.retry import Retry

        yield Retry(settings.retry)
    if settings.isolation is ExecutionMode.PROCESS:
        yield _pass_gate
    if settings.max_concurrency or settings.rate_limit:
        from agentrl.tools.guard.limits import limits

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
