"""The tools of one request, from its first turn to its end (plug-in life cycle)."""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from agentrl.messages import ToolCall, ToolResponse
from agentrl.tools.base import BaseTool
from agentrl.tools.runtime.instance import ToolInstance, ToolKwargs, ToolOutcome

T = TypeVar("T")


class Opening(NamedTuple):
    """A response of a tool's `create`, which is appended before the first turn."""

    tool: str
    response: ToolResponse


class ToolSession:
    """Create, execute, reward and release the tools of one request.

    Call `create` once, then `execute` for each turn with calls, `calc_rewards` once, and `release`
    in a `finally`, however the request ended.

    Args:
        tools: The tools of the row (`select_tools`), by name.
        instance_id: The request's id, with which each tool is created.
        tools_kwargs: The row's settings by tool name.
        timeout_s: Seconds of one call of one method, if a tool's config has no `timeout_s`.
        max_parallel_calls: Calls that run at once. The others queue, and their time-outs start
            after the queue.
        offered: Arguments for a `create` that has a parameter of that name. Tools on a thread or in
            a process get none: they are not on the event loop of the request.

    Raises:
        DataError: for an unknown key in `tools_kwargs`.

    Example:
        >>> async def ask(tools, calls):
        ...     session = ToolSession(tools, instance_id="1")
        ...     try:
        ...         await session.create()
        ...         return await session.execute(calls)
        ...     finally:
        ...         await session.release()
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        *,
        instance_id: str,
        tools_kwargs: Mapping[str, Mapping[str, Any] | None] | None = None,
        timeout_s: float = 30.0,
        max_parallel_calls: int = 8,
        offered: Mapping[str, Any] | None = None,
    ) -> None:
        given = tools_kwargs or {}
        self._instances = {
            name: ToolInstance(
                tool,
                instance_id=instance_id,
                kwargs=ToolKwargs.of(name, given.get(name)),
                timeout_s=timeout_s,
                offered=offered,
            )
            for name, tool in tools.items()
        }
        self._slots = asyncio.Semaphore(max_parallel_calls)
        self._releasing: asyncio.Task[list[BaseException]] | None = None

    async def create(self) -> list[Opening]:
        """Create every tool, all at once.

        Returns:
            The responses that are not empty, in the order of the tools, to be appended.

        Raises:
            ToolLifeError: of the first tool that failed, after all have ended.
        """
        created = await _gather([instance.create() for instance in self._instances.values()])
        _raise_first(created)
        by_name = zip(self._instances, created, strict=True)
        return [
            Opening(name, response)
            for name, response in by_name
            if isinstance(response, ToolResponse) and not response.is_empty()
        ]

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Execute all calls of one turn, at most `max_parallel_calls` at once.

        Args:
            calls: Calls of tools of this session, checked (`agentrl.rollout.tool_calls`).

        Returns:
            One outcome for each call, in the order of the calls. A call that failed has an outcome
            too. Cancelling cancels every call.
        """
        if len(calls) == 1:  # the usual case needs no task of its own
            return [await self._execute(calls[0])]
        return await asyncio.gather(*(self._execute(call) for call in calls))

    async def calc_rewards(self) -> dict[str, float]:
        """Return the rewards by tool, without the tools that give none.

        Raises:
            ToolLifeError: of the first tool that failed.
        """
        rewards = await _gather([instance.calc_reward() for instance in self._instances.values()])
        _raise_first(rewards)
        by_name = zip(self._instances, rewards, strict=True)
        return {name: reward for name, reward in by_name if isinstance(reward, float)}

    async def release(self) -> list[BaseException]:
        """Release every tool, all at once; takes no longer than the longest time-out.

        Cancelling the caller does not stop the releases, which then end in the background. A
        second call waits for the first.

        Returns:
            The errors, for the record.
        """
        if not self.needs_release:
            return []
        if self._releasing is None:
            self._releasing = asyncio.create_task(self._release(), name="release tools")
        return await asyncio.shield(self._releasing)

    @property
    def needs_release(self) -> bool:
        """Whether any tool has something to give back."""
        return any(instance.needs_release for instance in self._instances.values())

    async def _execute(self, call: ToolCall) -> ToolOutcome:
        arrived = time.monotonic()
        async with self._slots:
            return await self._instances[call.function.name].execute(call, arrived=arrived)

    async def _release(self) -> list[BaseException]:
        failures = await _gather([instance.release() for instance in self._instances.values()])
        return [failure for failure in failures if failure is not None]


async def _gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Await all at once; an error is the result of the one that raised it."""
    if len(works) != 1:
        return await asyncio.gather(*works, return_exceptions=True)
    try:
        return [await works[0]]  # the usual case needs no task of its own
    except Exception as error:  # noqa: BLE001 - the caller handles it
        return [error]


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
