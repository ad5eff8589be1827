"""Let the model give a task to a sub-agent: the same policy, with a context of its own."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic import Field

from agentrl.config.schema.run import CompactionConfig
from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError, ToolCallError, ToolError
from agentrl.messages import Message, OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.bundled import BundledTool, function_schema, string_parameter
from agentrl.tools.delegation import RunSubagent, SubagentEnd, SubagentLimits

TIMEOUT_S = 300.0
"""Default of `timeout_s`: a sub-agent takes longer than other calls."""


class DelegateToolConfig(Section):
    """The own keys of `DelegateTool`."""

    tools: list[str] | None = None
    """Names of the run's tools that a sub-agent may use; null: all."""
    system_prompt: str | None = None
    """The system message of a sub-agent; null: none."""
    max_subagents: int = Field(default=4, ge=1, strict=True)
    """Sub-agents of one request."""
    max_depth: int = Field(default=1, ge=1, strict=True)
    """Levels of sub-agents; 1: a sub-agent cannot start another."""
    max_response_length: int | None = Field(default=None, ge=1, strict=True)
    """Tokens of a sub-agent's response; null: as many as the caller's."""
    max_assistant_turns: int | None = Field(default=8, ge=1, strict=True)
    """Completions of one sub-agent."""
    max_tool_calls: int | None = Field(default=16, ge=0, strict=True)
    """Tool calls of one sub-agent."""
    compaction: CompactionConfig | None = None
    """The keys of `rollout.multi_turn.compaction`, for sub-agents; null: none. Those of the run do
    not apply to sub-agents."""


@dataclass(slots=True)
class _Delegations:
    """The sub-agents of one request."""

    run: RunSubagent | None
    numbers: "count[int]"


class DelegateTool(BundledTool):
    """Run a sub-agent for each call; its last answer is the result.

    The sub-agent is the policy, on the same engine, with the argument `task` as its only message
    after `system_prompt`. It does not see the conversation of its caller. Its sequence becomes a
    branch of the trajectory (`delegate`) and is trained as `algorithm.segment_credit` declares.

    If one of its limits ends it, the model reads what it wrote last, and that it was stopped. If it
    fails, the call crashes, and its sequence is kept without being trained. The metrics of a call
    say how the sub-agent ended: `end`, `is_cut`, `num_turns`, `num_tool_calls`, `num_tokens`,
    `request_id`. A call beyond `max_subagents` is a `ToolError`.

    Args:
        config: The keys of `DelegateToolConfig`. `timeout_s`, 300 seconds, limits one sub-agent.
        tool_schema: Shown to the model; None: the bundled schema.
    """

    keys_class = DelegateToolConfig
    why_inline = "a sub-agent runs on the event loop of the rollout"
    default_schema = function_schema(
        "delegate",
        "Give a task to a helper, and read its answer. It has tools, and it does not see this "
        "conversation: the task must contain everything that it needs to know.",
        task=string_parameter("The task."),
    )

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__({"timeout_s": TIMEOUT_S, **config}, tool_schema)
        keys: DelegateToolConfig = self._keys
        if config.get("cache") is not None:
            raise ConfigError(
                "the answer of a sub-agent belongs to its own trajectory",
                key="config.cache",
                expected="no such key",
            )
        if keys.max_depth == 1 and self.name in (keys.tools or ()):
            raise ConfigError(
                f"the sub-agents of {self.name!r} cannot use {self.name!r}: max_depth is 1",
                key="config.tools",
                expected=f"other tools, or max_depth of at least 2, not {self.name!r}",
            )
        self._limits = SubagentLimits(
            tools=keys.tools,
            max_response_tokens=keys.max_response_length,
            max_assistant_turns=keys.max_assistant_turns,
            max_tool_calls=keys.max_tool_calls,
            max_depth=keys.max_depth,
            compaction=keys.compaction,
        )
        self._delegations: dict[str, _Delegations] = {}

    @property
    def has_compaction(self) -> bool:
        """Whether sub-agents replace their history by summaries."""
        return self._limits.compaction is not None

    def check_tools(self, tools: Iterable[BaseTool]) -> None:
        """Check that the run has the tools of the sub-agents.

        Raises:
            ConfigError: for a name that no tool has.
        """
        known = [tool.name for tool in tools]
        for name in self._limits.tools or ():
            if name not in known:
                raise ConfigError(
                    f"the tool {self.name!r} gives its sub-agents {name!r}, which the run lacks",
                    key="config.tools",
                    expected=f"some of {', '.join(known)}",
                )

    async def create(
        self,
        instance_id: str | None = None,
        *,
        run_subagent: RunSubagent | None = None,
        **create_kwargs: Any,
    ) -> tuple[str, ToolResponse]:
        """Keep what starts sub-agents of the request.

        Args:
            instance_id: The request's id.
            run_subagent: Offered by the state machine; None elsewhere.
            **create_kwargs: Not used.
        """
        instance_id = instance_id or uuid.uuid4().hex
        self._delegations[instance_id] = _Delegations(run_subagent, count())
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run a sub-agent for `parameters["task"]`.

        Raises:
            ToolError: If the request has used all its sub-agents, or the task is empty.
            ToolCallError: If the sub-agent failed, or nothing can run one.
        """
        keys: DelegateToolConfig = self._keys
        delegations = self._delegations[instance_id]
        task = str(parameters.get("task", "")).strip()
        if not task:
            raise ToolError("Error: the task is empty")
        if delegations.run is None:
            raise ToolCallError(
                "sub-agents need the state machine (the agent loop `tool_agent`)", tool=self.name
            )
        number = next(delegations.numbers)
        if number >= keys.max_subagents:
            raise ToolError(f"Error: no helper is left: all {keys.max_subagents} were used")
        messages = [Message(role="user", content=task)]
        if keys.system_prompt is not None:
            messages.insert(0, Message(role="system", content=keys.system_prompt))
        ended = await delegations.run(messages, number=number, limits=self._limits)
        if ended.error is not None:
            raise ToolCallError(f"the sub-agent {ended.request_id} failed: {ended.error}")
        return ToolResult(ToolResponse(text=_describe(ended)), metrics=_figures(ended))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forget the request. The rollout itself waits for its sub-agents."""
        self._delegations.pop(instance_id, None)


def _describe(ended: SubagentEnd) -> str:
    """Return what the model reads."""
    answer = ended.answer or "The helper gave no answer."
    return f"{answer}\n[stopped: {ended.end}]" if ended.is_cut else answer


def _figures(ended: SubagentEnd) -> dict[str, Any]:
    names = ("request_id", "end", "is_cut", "num_turns", "num_tool_calls", "num_tokens")
    return {name: getattr(ended, name) for name in names}
