"""Where a tool's methods run: on the event loop, on threads, or in a process of their own.

A lane runs one method at a time-out's mercy: it is cancelled when the time is up, and sees to it
that what it runs ends as far as it can be ended.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from agentrl.plugins.call import call_method, in_thread_loop
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


class Lane(Protocol):
    """Where one tool runs, for one request."""

    @property
    def gate(self) -> AbstractAsyncContextManager[None]:
        """Held around each execution: lets through as many at once as the lane can run."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the instance went down with what it ran in, and must be made again."""
        ...

    async def open(self) -> None:
        """Wait for what must be there before the first call; no time-out of the tool counts it."""
        ...

    async def run(self, call: MethodCall) -> Any:
        """Make the call; raises what it raises. Cancelling ends it, as far as that can be."""
        ...

    async def close(self) -> None:
        """Give back what the lane itself holds. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class LoopLane:
    """Run on the event loop."""

    tool: BaseTool
    gate: AbstractAsyncContextManager[None] = field(default_factory=nullcontext[None])
    is_lost: bool = False

    async def open(self) -> None:
        """Need nothing."""

    async def run(self, call: MethodCall) -> Any:
        """Make the call here."""
        return await call.on(self.tool)

    async def close(self) -> None:
        """Hold nothing, so give nothing back."""


@dataclass(frozen=True, slots=True)
class ThreadLane:
    """Run each call in an event loop of its own, on a daemon thread of its own."""

    tool: BaseTool
    gate: AbstractAsyncContextManager[None] = field(default_factory=nullcontext[None])
    is_lost: bool = False

    async def open(self) -> None:
        """Need nothing."""

    async def run(self, call: MethodCall) -> Any:
        """Make the call on a thread; one that blocks for ever keeps that thread."""
        return await in_thread_loop(partial(call.on, self.tool))

    async def close(self) -> None:
        """Hold nothing, so give nothing back."""
