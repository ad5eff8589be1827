"""Detect cancellation, and wait for work that must finish although its caller is cancelled."""

import asyncio
from collections.abc import Sequence
from typing import Any


def is_cancelled() -> bool:
    """Whether the running task is being cancelled. If not, a plug-in raised `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_despite_cancellation(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all tasks have ended, whatever their results.

    If the caller is cancelled meanwhile, the cancellation is raised after the last task has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
