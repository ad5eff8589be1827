"""Connections of a training rank to rollout workers that live in actors."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from agentrl.cluster.handles import RemoteHost
from agentrl.errors import WorkerLateError, WorkerLostError

_POLL_S = 0.5
"""Seconds between two attempts to reach a worker that is starting again."""


def connect_workers(
    hosts: Sequence[RemoteHost], *, call_timeout_s: float, start_timeout_s: float
) -> "list[ActorConnection]":
    """Make a connection to each worker.

    Args:
        hosts: The processes of the workers.
        call_timeout_s: Seconds that a call may take.
        start_timeout_s: Seconds that a worker has to start, or to start again, and to build its
            tokenizer and plug-ins.
    """
    return [
        ActorConnection(host, call_timeout_s=call_timeout_s, start_timeout_s=start_timeout_s)
        for host in hosts
    ]


class ActorConnection:
    """One rollout worker. Ray starts it again after its death, and the connection stays valid.

    Args:
        host: The process of the worker.
        call_timeout_s: Seconds that a call may take.
        start_timeout_s: Seconds that `open` may take.
    """

    def __init__(self, host: RemoteHost, *, call_timeout_s: float, start_timeout_s: float) -> None:
        self.name = host.name
        self._host = host
        self._call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s

    async def open(self, session: str, settings: Any) -> Any:
        """Open a session; a worker that was just started builds its plug-ins first.

        A worker that Ray is starting again is waited for.

        Raises:
            WorkerLostError: The worker will not be started again, or not in time.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._start_timeout_s
        while True:
            left_s = max(1.0, deadline - clock())
            try:
                return await self._call("open", session, settings, timeout_s=left_s)
            except WorkerLostError as error:
                if not error.details.get("is_restarting") or clock() > deadline:
                    raise
            await asyncio.sleep(_POLL_S)

    async def send(self, session: str, messages: bytes) -> None:
        """Deliver messages."""
        await self._call("send", session, messages, timeout_s=self._call_timeout_s)

    async def receive(self, session: str) -> Any:
        """Wait for messages."""
        return await self._call("receive", session, timeout_s=self._call_timeout_s)

    async def close_session(self, session: str) -> None:
        """End the session."""
        await self._call("close_session", session, timeout_s=self._call_timeout_s)

    async def restart(self) -> None:
        """End the process; Ray starts it again."""
        ray.kill(self._host.actor, no_restart=False)

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of the worker.

        Raises:
            WorkerLostError: The process died, was replaced, or is late.
            Exception: What the method raised.
        """
        try:
            reference = self._host.actor.call.remote(method, *arguments)
            answer = asyncio.wrap_future(reference.future())
            await asyncio.wait([answer], timeout=timeout_s)
            # The event loop may have been busy or suspended while the answer arrived.
            if not answer.done() and not ray.wait([reference], timeout=0)[0]:
                answer.cancel()
                raise WorkerLateError(f"{self.name} did not answer {method} for {timeout_s:g} s")
            return await answer
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            reason = " ".join(str(error).split())[:300]
            is_restarting = True if isinstance(error, ActorUnavailableError) else None
            raise WorkerLostError(
                f"{self.name} died", reason=reason, is_restarting=is_restarting
            ) from None
        except RayError as error:
            raise WorkerLostError(f"{self.name} cannot be reached: {error}") from None
