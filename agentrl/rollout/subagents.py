"""Sub-agents of a request: requests of their own, whose sequences become its branches."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

from agentrl.answers import without_thought
from agentrl.engines.protocol import CompletionSource
from agentrl.errors import ConfigError, Fault
from agentrl.messages import Message
from agentrl.plugins.cancellation import wait_despite_cancellation
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.tools.base import BaseTool
from agentrl.tools.delegation import SubagentEnd, SubagentLimits, starts_subagents


class Drive(Protocol):
    """Drives a pending request to its end (`run_request`)."""

    def __call__(
        self,
        request: AsyncRolloutRequest,
        context: RolloutContext,
        source: CompletionSource,
        *,
        num_levels: int | None,
    ) -> Awaitable[AsyncRolloutRequest]:
        """Drive the request; `num_levels` of sub-agents may be below it."""
        ...


class Subagents:
    """Runs the sub-agents of one request, and attaches their sequences to it.

    In a deterministic rollout they run one after the other: the lock-step rounds allow one call of
    each request, and the order of the calls must not depend on the clock.

    Args:
        parent: The request.
        context: Its context. Sub-agents have no interaction, and the compaction of their limits.
        source: Generates the completions.
        drive: Drives a sub-agent.
        num_levels: Levels of sub-agents that may be below the request; None: as the tools say.
    """

    def __init__(
        self,
        parent: AsyncRolloutRequest,
        context: RolloutContext,
        source: CompletionSource,
        drive: Drive,
        num_levels: int | None = None,
    ) -> None:
        self._parent = parent
        self._context = context
        self._source = source
        self._drive = drive
        self._num_levels = num_levels
        self._turn = asyncio.Lock() if context.is_deterministic else nullcontext()
        self._started: list[tuple[AsyncRolloutRequest, asyncio.Task[AsyncRolloutRequest]]] = []

    async def run(
        self, messages: Sequence[Message], *, number: int, limits: SubagentLimits
    ) -> SubagentEnd:
        """Run a sub-agent to its end (see `RunSubagent`). Cancelling ends it as aborted.

        Raises:
            ConfigError: If the run has no tool of a name in `limits.tools`.
        """
        levels = limits.max_depth if self._num_levels is None else self._num_levels
        levels = min(levels, limits.max_depth) - 1
        tools = self._select(limits.tools, is_last=levels <= 0)
        child = self._make(messages, number, limits, [tool.name for tool in tools])
        settings = self._context.settings.model_copy(update={"compaction": limits.compaction})
        context = replace(self._context, interactions={}, settings=settings)
        async with self._turn:
            driven = self._drive(child, context, self._source, num_levels=levels)
            task = asyncio.ensure_future(driven)
            self._started.append((child, task))
            await task
        return _describe(child)

    async def wait(self) -> None:
        """Wait until all sub-agents have ended, also those whose calls were given up."""
        await wait_despite_cancellation([task for _, task in self._started])

    def attach(self) -> None:
        """Attach those that have ended, in the order in which they began."""
        for child, task in self._started:
            if task.done() and child.is_finished:  # a task may be cancelled before it begins
                self._parent.add_branch(child, "delegate")
        self._started = [one for one in self._started if not one[1].done()]

    def _select(self, names: Sequence[str] | None, *, is_last: bool) -> list[BaseTool]:
        by_name = {tool.name: tool for tool in self._context.tools}
        for name in names or ():
            if name not in by_name:
                raise ConfigError(
                    f"a sub-agent cannot have the tool {name!r}: the run has no such tool",
                    expected=f"some of {', '.join(by_name)}",
                )
        tools = [by_name[name] for name in (by_name if names is None else names)]
        return [tool for tool in tools if not (is_last and starts_subagents(tool))]

    def _make(
        self, messages: Sequence[Message], number: int, limits: SubagentLimits, tools: list[str]
    ) -> AsyncRolloutRequest:
        parent = self._parent
        request_id = f"{parent.request_id}/{number}"
        own = parent.budgets.max_response_tokens
        budgets = parent.budgets.model_copy(
            update={
                "max_response_tokens": min(own, limits.max_response_tokens or own),
                "max_assistant_turns": limits.max_assistant_turns,
                "max_tool_calls": limits.max_tool_calls,
                "timeout_s": None,  # the parent's clock and that of the call include its time
            }
        )
        given = parent.tools_kwargs
        return AsyncRolloutRequest(
            request_id=request_id,
            parent_id=parent.request_id,
            uid=request_id,  # the group's, as soon as it is attached
            messages=[*messages],
            tool_selection=tools,
            tools_kwargs={name: given[name] for name in tools if name in given},
            data_source=parent.data_source,
            sampling=parent.sampling,
            budgets=budgets,
            seed=draw_seed(f"{parent.seed}:{parent.attempt}:delegate:{number}"),
        )


def _describe(child: AsyncRolloutRequest) -> SubagentEnd:
    assert child.end is not None  # it was driven to its end
    assert child.stop_reason is not None
    last = child.messages[-1]
    text = last.text if last.role == "assistant" else ""
    return SubagentEnd(
        answer=without_thought(text).strip(),
        request_id=child.request_id,
        end=str(child.stop_reason),
        is_cut=child.end.fault is Fault.MODEL,
        error=None if child.error is None else f"{child.error.kind}: {child.error.message}",
        num_turns=child.num_assistant_turns,
        num_tool_calls=child.num_tool_calls,
        num_tokens=sum(turn.num_tokens for turn in child.trajectory_turns),
    )
