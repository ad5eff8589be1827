"""Handles of a run's processes: what one process uses to call another."""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from agentrl.cluster.host import HostInfo
from agentrl.config.schema.cluster import HostRole
from agentrl.errors import ClusterError


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A process of the run. It can be sent to other processes, and stays valid after a restart."""

    name: str
    role: HostRole
    pool: str
    actor: Any
    """Ray's handle of the `Host`."""

    async def call(self, method: str, *arguments: Any, timeout_s: float, **keywords: Any) -> Any:
        """Call a method of the hosted object, without blocking the event loop.

        Args:
            method: The name of the method.
            *arguments: Of the method. Large arrays travel through the object store.
            timeout_s: Seconds that the call may take.
            **keywords: Of the method.

        Raises:
            ClusterError: if the process died, or did not answer in time.
            Exception: what the method raised.
        """
        reference = self.actor.call.remote(method, *arguments, **keywords)
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            ray.cancel(reference)
            raise self._late(method, timeout_s) from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayActorError as error:
            raise self._died(method, error) from error

    def call_and_wait(self, method: str, *arguments: Any, timeout_s: float, **keywords: Any) -> Any:
        """Call a method of the hosted object and wait for its result; see `call`."""
        return self._wait(self.actor.call.remote(method, *arguments, **keywords), method, timeout_s)

    def control(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a short method, also while other calls use all capacity of the process."""
        return self._wait(self.actor.control.remote(method, *arguments), method, timeout_s)

    def describe(self, *, timeout_s: float) -> HostInfo:
        """Wait until the process has made its object; return where it runs."""
        return self._wait(self.actor.describe.remote(), "start", timeout_s)

    def _wait(self, reference: Any, method: str, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            raise self._late(method, timeout_s) from None
        except RayActorError as error:
            raise self._died(method, error) from error

    def _late(self, method: str, timeout_s: float) -> ClusterError:
        return ClusterError(f"{self.name} did not answer {method} within {timeout_s:g} s")

    def _died(self, method: str, error: RayActorError) -> ClusterError:
        reason = " ".join(str(error).split())
        return ClusterError(f"{self.name} died in {method}", reason=reason[:500])


@dataclass(frozen=True, slots=True)
class PluginHost:
    """A tool or scorer that asks for resources, in its process."""

    key: str
    """`PlacedPlugin.key`."""
    host: RemoteHost


@dataclass(frozen=True, slots=True)
class ClusterHandles:
    """The processes that a training rank may call."""

    workers: tuple[RemoteHost, ...] = ()
    """Rollout workers; empty: each rank drives its own requests."""
    servers: tuple[RemoteHost, ...] = ()
    """SGLang servers; empty: the engine is embedded, or its addresses are in the run file."""
    ranks: tuple[RemoteHost, ...] = ()
    """All training ranks, in their order, for calls of workers to the embedded engine."""
    plugins: tuple[PluginHost, ...] = ()
    """Tools and scorers that ask for resources."""
    call_timeout_s: float = 120.0
    """`cluster.call_timeout_s`."""
