"""Tools and scorers in actors with their `resources`, and how ranks and workers call them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.cluster.handles import PluginHost, RemoteHost
from agentrl.errors import WorkerLostError

_POLL_S = 0.5
"""Seconds between two attempts to reach a process that is starting again."""


def connect_plugins(
    plugins: Sequence[PluginHost], *, start_timeout_s: float
) -> "dict[str, ActorObject]":
    """Make the connection to each plug-in, by its key.

    Args:
        plugins: The processes of the plug-ins.
        start_timeout_s: Seconds that a process has to start again after its death.
    """
    return {
        one.key: ActorObject(one.key, one.host, start_timeout_s=start_timeout_s) for one in plugins
    }


class ActorObject:
    """A `RemoteObject` in an actor. It can be sent to other processes.

    Args:
        name: For messages.
        host: The process. Its handle stays valid when Ray starts it again.
        start_timeout_s: Seconds that `wait_until_ready` may take.
    """

    def __init__(self, name: str, host: RemoteHost, *, start_timeout_s: float) -> None:
        self.name = name
        self._host = host
        self._start_timeout_s = start_timeout_s
        self._is_away = False
        """Whether the last call found the process dead."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; see `RemoteObject`. After a death it waits for the new process."""
        if self._is_away:
            await self.wait_until_ready()
        return await self._get(self._host.actor.call.remote(method, *arguments))

    async def wait_until_ready(self) -> None:
        """Wait until the process has made its object; see `RemoteObject`."""
        end = asyncio.get_running_loop().time() + self._start_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(end):
                    await self._get(self._host.actor.describe.remote())
                self._is_away = False
                return
            except TimeoutError:
                limit = f"{self._start_timeout_s:g} s"
                raise WorkerLostError(f"{self.name} did not start within {limit}") from None
            except WorkerLostError:
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _get(self, reference: Any) -> Any:
        try:
            return await asyncio.wrap_future(reference.future())
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            self._is_away = True
            reason = " ".join(str(error).split())[:300]
            raise WorkerLostError(f"{self.name} died", reason=reason) from None
        except RayError as error:
            raise WorkerLostError(f"{self.name} cannot be reached: {error}") from None
