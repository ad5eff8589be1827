"""What the rollout offers to tools that start sub-agents: the capability `run_subagent`.

A tool gets it if its `create` has a parameter of this name (`DelegateTool` does).
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.config.schema.run import CompactionConfig
from agentrl.messages import Message
from agentrl.tools.base import BaseTool

RUN_SUBAGENT = "run_subagent"
"""Name of the parameter of `create`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentLimits:
    """What one sub-agent may use. Its time counts in the wall clock of the trajectory."""

    tools: Sequence[str] | None = None
    """Names of its tools, of all tools of the run; None: all of them."""
    max_response_tokens: int | None = None
    """Tokens of the response of one of its sequences, sampled and observed; None: as many as the
    caller's."""
    max_assistant_turns: int | None = None
    max_tool_calls: int | None = None
    max_depth: int = 1
    """Levels of sub-agents below the trajectory. On the last one, tools that start sub-agents are
    left out."""
    compaction: CompactionConfig | None = None
    """How its history is replaced by summaries; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentEnd:
    """How a sub-agent ended."""

    answer: str
    """The text of its last message, without a thought; empty if there is none."""
    request_id: str
    """Id of its sequence, a branch of the trajectory."""
    end: str
    """Its stop reason."""
    is_cut: bool
    """Whether one of its limits ended it."""
    error: str | None = None
    """What failed; None if nothing did."""
    num_turns: int = 0
    """Completions."""
    num_tool_calls: int = 0
    num_tokens: int = 0
    """Tokens of the responses of its sequences."""


class RunSubagent(Protocol):
    """Runs sub-agents for the tools of one request."""

    async def __call__(
        self, messages: Sequence[Message], *, number: int, limits: SubagentLimits
    ) -> SubagentEnd:
        """Run a sub-agent to its end, and attach its sequences to the trajectory.

        Args:
            messages: Its prompt.
            number: Of the sub-agent in its request, counted from 0; its id and seed depend on it.
            limits: What it may use.

        Raises:
            ConfigError: If the run has no tool of a name in `limits.tools`.
        """
        ...


def starts_subagents(tool: BaseTool) -> bool:
    """Whether a tool takes the capability `run_subagent`."""
    return RUN_SUBAGENT in inspect.signature(tool.create).parameters
