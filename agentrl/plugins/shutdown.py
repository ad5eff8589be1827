"""The end of a run, for the plug-ins that hold something for all of its requests."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Protocol

from agentrl.errors import words_of
from agentrl.plugins.call import call_bounded

logger = logging.getLogger(__name__)

TIMEOUT_S = 15.0


class HasShutdown(Protocol):
    """A plug-in."""

    @property
    def name(self) -> str:
        """Under which it is known."""
        ...

    def shutdown(self) -> Awaitable[None]:
        """Give back what the run shares."""
        ...


async def shut_down(plugins: Iterable[HasShutdown], *, timeout_s: float = TIMEOUT_S) -> None:
    """Shut every plug-in down, all at once; what one raises is logged."""
    await asyncio.gather(*(_shut_down(plugin, timeout_s) for plugin in plugins))


async def _shut_down(plugin: HasShutdown, timeout_s: float) -> None:
    try:
        await call_bounded(plugin.shutdown, timeout_s=timeout_s, name=plugin.name)
    except Exception as error:  # noqa: BLE001 - the boundary round users' code
        logger.warning("%s, shutdown: %s", plugin.name, words_of(error))
