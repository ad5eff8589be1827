"""An `asyncio.Runner` that also works where an event loop runs already, as in notebooks."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class AnyRunner(asyncio.Runner):  # pyright: ignore[reportGeneralTypeIssues] # final in stubs only
    """Runs coroutines on a loop of its own, whatever runs in the calling thread.

    If the calling thread runs an event loop, the coroutine runs on another thread, and the caller
    waits for it. Ctrl-C is heard by the waiting thread: a handler may cancel the coroutine.
    """

    def run(self, coro: Coroutine[Any, Any, T], *, context: Context | None = None) -> T:
        """Run a coroutine to its end."""
        return _aside(lambda: super(AnyRunner, self).run(coro, context=context))

    def close(self) -> None:
        """Shut the loop down."""
        _aside(super().close)


def _aside(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-loop") as executor:
        return executor.submit(work).result()
