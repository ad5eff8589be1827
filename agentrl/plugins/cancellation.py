"""Telling cancellations apart, and finishing what must be finished in spite of them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def is_cancelled() -> bool:
    """Whether the running task is being cancelled; else a `CancelledError` is a plug-in's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def finish_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Await work to its end; a cancellation meanwhile waits for it, and then goes on."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
