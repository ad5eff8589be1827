"""Running calls that can all be ended at once, with a reason; and requests that take turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from agentrl.errors import EngineError


class Turns:
    """Requests that would disturb each other, one after the other.

    An `asyncio.Lock` stays with the event loop on which somebody first had to wait; here each loop
    has its own.
    """

    def __init__(self) -> None:
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )

    def take(self) -> asyncio.Lock:
        """What to hold for a turn."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())


class CallGate:
    """Lets calls through while it is open; closing it ends those that run."""

    def __init__(self) -> None:
        self._closed: EngineError | None = None
        self._running: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Hold a call.

        Raises:
            EngineError: why the gate is closed, or was closed meanwhile.
        """
        self._check()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._running.add(scope)
                self._is_idle.clear()
                yield
        except TimeoutError:
            if scope.expired():
                self._check()
            raise
        finally:
            self._running.discard(scope)
            if not self._running:
                self._is_idle.set()

    async def close(self, reason: EngineError) -> None:
        """End the running calls, and refuse further ones until it is opened."""
        self._closed = reason
        for scope in self._running:
            scope.reschedule(0)
        await self._is_idle.wait()

    def open(self) -> None:
        """Let calls through."""
        self._closed = None

    def _check(self) -> None:
        # An error for each caller: one that is raised twice would collect both tracebacks.
        if self._closed is not None:
            raise EngineError(self._closed.args[0], **self._closed.details)
