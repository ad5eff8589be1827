"""Let calls through a gate that can end all of them at once, with a reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.errors import EngineError


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
