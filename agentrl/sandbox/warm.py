"""Guests that are kept ready, each for one request alone."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from agentrl.errors import SandboxError
from agentrl.sandbox.guest_link import GuestLink

_MAX_STARTING = max(2, os.cpu_count() or 2)


class WarmPool:
    """Hands out guests and starts others behind them; one that was handed out never comes back.

    Args:
        start: Starts a guest.
        num_warm: How many are kept ready; from the first request on.
    """

    def __init__(self, start: Callable[[], Awaitable[GuestLink]], num_warm: int) -> None:
        self._start_guest, self._num_warm = start, num_warm
        self._ready: deque[GuestLink] = deque()
        self._starting = asyncio.Semaphore(_MAX_STARTING)
        self._refill: asyncio.Task[None] | None = None
        self._is_closed = False

    async def take(self) -> GuestLink:
        """Hand out a guest: a ready one, or one that is started for it.

        Raises:
            SandboxError: where none starts.
        """
        while self._ready:
            guest = self._ready.popleft()
            if guest.is_alive:
                self._begin_refill()
                return guest
            guest.kill()
        guest = await self._start()
        self._begin_refill()
        return guest

    async def _start(self) -> GuestLink:
        async with self._starting:
            return await self._start_guest()

    def _begin_refill(self) -> None:
        if self._is_closed or len(self._ready) >= self._num_warm:
            return
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        # Who asks next starts one itself, and hears why that fails.
        with suppress(SandboxError):
            while len(self._ready) < self._num_warm:
                self._ready.append(await self._start())

    async def close(self) -> None:
        """End the guests that nobody took."""
        self._is_closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill])
        while self._ready:
            await self._ready.popleft().close()
