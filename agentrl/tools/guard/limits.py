"""How many calls of a tool run at once, and how many in a period, over all requests."""

import asyncio
from collections.abc import Iterator

from aiolimiter import AsyncLimiter

from agentrl.tools.base import ToolResult
from agentrl.tools.guard.path import Station, Visit, Way
from agentrl.tools.settings import ToolSettings


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
