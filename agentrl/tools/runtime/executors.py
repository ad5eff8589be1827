"""Run a tool's methods on the event loop, on threads, or in a process (`config.isolation`).

When a call's time is up, it is cancelled. The executor then ends what it runs, as far as possible.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.errors import ToolLifeError
from agentrl.plugins.call import ExecutionMode, call_method, in_thread_loop
from agentrl.tools.base import BaseTool


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One call of one of a tool's methods."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    async def on(self, tool: BaseTool) -> Any:
        """Make the call."""
        return await call_method(getattr(tool, self.method), *self.args, **self.kwargs)


class ToolExecutor:
    """Run the methods of one tool for one request; this class runs them on the event loop."""

    request_lock: AbstractAsyncContextManager[None] = nullcontext()
    """Held around each execution: limits how many run at once."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool

    @property
    def is_lost(self) -> bool:
        """Whether the instance ended with its process, and must be created again."""
        return False

    async def open(self) -> None:
        """Wait for what the first call needs. This wait does not count as time of a call."""

    async def run(self, call: MethodCall) -> Any:
        """Make the call, and raise what it raises. Cancelling ends the call if possible."""
        return await call.on(self.tool)

    async def close(self) -> None:
        """Give back what the executor holds. May be called twice."""


class ThreadExecutor(ToolExecutor):
    """Run each call in an event loop of its own, on a daemon thread of its own."""

    async def run(self, call: MethodCall) -> Any:
        """Make the call on a thread. A call that blocks forever keeps its thread."""
        return await in_thread_loop(partial(call.on, self.tool))


class InstanceLostError(ToolLifeError):
    """The instance ended with its process before the call, which did not run."""


def make_executor(tool: BaseTool, mode: ExecutionMode, *, timeout_s: float) -> ToolExecutor:
    """Make the executor of a tool for one request.

    Args:
        tool: The tool.
        mode: `config.isolation`.
        timeout_s: Seconds of one call; only a tool in another process of the cluster needs it.
    """
    if tool.remote_object is not None:
        from agentrl.tools.runtime.remote import RemoteExecutor

        return RemoteExecutor(tool, tool.remote_object, mode, timeout_s)
    if mode is ExecutionMode.PROCESS:
        # Starts a server of processes when it is used, so only tools that ask for it import it.
        from agentrl.tools.runtime.process import ProcessExecutor

        return ProcessExecutor(tool)
    return ThreadExecutor(tool) if mode is ExecutionMode.THREAD else ToolExecutor(tool)
