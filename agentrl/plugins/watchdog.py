"""Log the name of a plug-in that blocks the event loop, while it does so."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Self

from agentrl.plugins.call import TASK_PREFIX, in_thread

logger = logging.getLogger(__name__)


class LoopWatchdog:
    """Watch an event loop from a thread; a context manager, entered inside that loop.

    The log has one warning for each plug-in, with the line of code that blocks.

    Args:
        threshold_s: Seconds for which the loop may not respond.

    Example:
        >>> async def main():
        ...     with LoopWatchdog() as watchdog:
        ...         await asyncio.sleep(0)
        ...     return watchdog.blocked_s
        >>> asyncio.run(main())
        {}
    """

    def __init__(self, threshold_s: float = 0.5) -> None:
        self.blocked_s: dict[str, float] = {}
        """By plug-in (`tool:calculator`): the longest time that it was seen to block the loop."""
        self._threshold_s = threshold_s
        self._over = threading.Event()
        self._beat = 0.0

    def __enter__(self) -> Self:
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        self._beat = time.monotonic()
        self._over = threading.Event()
        threading.Thread(
            target=self._watch,
            args=(loop, ident, self._over),
            name="agentrl-loop-watchdog",
            daemon=True,
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int, over: threading.Event) -> None:
        running, since = None, 0.0
        while not over.wait(self._threshold_s / 4):
            try:
                loop.call_soon_threadsafe(self._mark)
            except RuntimeError:  # the loop is closed
                return
            now = time.monotonic()
            # A loop may not respond because it runs many tasks, of which none is too long.
            if (task := asyncio.current_task(loop)) is not running:
                running, since = task, now
            silent_s = now - max(since, self._beat)
            if silent_s > self._threshold_s:
                frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]
                self._blame(task, frame, silent_s)

    def _mark(self) -> None:
        self._beat = time.monotonic()

    def _blame(
        self, task: "asyncio.Task[object] | None", frame: FrameType | None, silent_s: float
    ) -> None:
        name = task.get_name() if task else ""
        if not name.startswith(TASK_PREFIX) or _starts_a_thread(frame):
            return
        plugin = name.removeprefix(TASK_PREFIX)
        if plugin not in self.blocked_s:
            where = traceback.format_list(traceback.extract_stack(frame)[-1:]) if frame else [""]
            logger.warning(
                "%s has blocked the event loop for %.1f s, and every request with it; it is at\n"
                "%s\nRun blocking code in a plain `def`; a tool may set `isolation: thread`.",
                plugin,
                silent_s,
                where[0].rstrip(),
            )
        self.blocked_s[plugin] = max(silent_s, self.blocked_s.get(plugin, 0.0))


def _starts_a_thread(frame: FrameType | None) -> bool:
    """Whether agentrl waits for its own thread to start; then the cause is a busy machine."""
    caller = frame
    while caller is not None and caller.f_code.co_filename == threading.__file__:
        caller = caller.f_back
    return caller is not frame and caller is not None and caller.f_code is in_thread.__code__
