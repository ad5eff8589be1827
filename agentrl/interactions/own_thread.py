"""A thread that belongs to one object which must be made, used and closed on the same one."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_NAME = "agentrl-environment"

_Job = tuple[Future[Any], Callable[[], Any]]


class OwnThread:
    """Run blocking functions one after the other, all on one daemon thread.

    A thread cannot be killed. One that hangs is left behind, and being a daemon holds up nothing;
    should it ever come back, what was given to `end` is run, and it ends.

    Example:
        >>> async def main():
        ...     thread = OwnThread()
        ...     try:
        ...         return await thread.run(lambda: 2 + 3)
        ...     finally:
        ...         await thread.end(lambda: None)
        >>> asyncio.run(main())
        5
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_started = False

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function behind those before it. Cancelling drops one that has not begun.

        Raises:
            Exception: what it raised; a `SystemExit` and its like come out as a `RuntimeError`.
        """
        return await asyncio.wrap_future(self._put(function))

    async def end(self, last: Callable[[], None]) -> None:
        """Run a last function and end the thread. Cancelling drops neither.

        Raises:
            Exception: what it raised.
        """
        done = self._put(last)
        self._jobs.put(None)
        await asyncio.shield(asyncio.wrap_future(done))

    def _put(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, function))
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = function()
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        future.set_exception(_awaitable(error))
    else:
        future.set_result(value)


def _awaitable(error: BaseException) -> Exception:
    """Make an error that a future can carry: not `StopIteration`, and none that ends a program."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
