"""verl's agent loop with tools and interactions, to be subclassed.

A run needs this class only for subclasses: its own agent `tool_agent` is the request state machine.
The handlers have verl's names and return the next state. Tokens are rendered as in every agent loop
here, so what was sampled is trained as it was sampled.
"""

import asyncio
import copy
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import uuid4

from agentrl.agent_loops.base import AgentLoopBase, ToolListWrap
from agentrl.agent_loops.output import AgentLoopMetrics, AgentLoopOutput
from agentrl.compat.agent_loops import FunctionCall, ToolParser, simple_timer
from agentrl.errors import AgentError
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.interactions.base import InteractionResult
from agentrl.interactions.registry import select_interaction
from agentrl.messages import ToolResponse
from agentrl.plugins.call import call_method
from agentrl.tools.signatures import create_arguments


class AgentState(Enum):
    """What a loop does next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


@dataclass
class AgentData:
    """The state of one conversation; the first fields are those of its row."""

    messages: list[dict[str, Any]]
    image_data: Any
    metrics: dict[str, Any]
    """Seconds by name."""
    request_id: str
    tools_kwargs: dict[str, Any]
    interaction: BaseInteraction | None = None
    interaction_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_ids: list[int] = field(default_factory=list[int])
    response_ids: list[int] = field(default_factory=list[int])
    response_mask: list[int] = field(default_factory=list[int])
    response_logprobs: list[float] = field(default_factory=list[float])
    turn_scores: list[float] = field(default_factory=list[float])
    tool_rewards: list[float] = field(default_factory=list[float])
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list[FunctionCall])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])


class ToolAgentLoop(AgentLoopBase):
    """Generates, calls the run's tools and asks the interaction, as `rollout.multi_turn` says."""

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in (tools.tools if tools else ())}
        self.tool_schemas = [tool.tool_schema.to_template() for tool in self.tools.values()]

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Read the configuration and load the interactions, once in a process."""
        rollout = config.actor_rollout_ref.rollout
        turns = rollout.multi_turn
        cls.max_user_turns = turns.max_user_turns
        cls.max_assistant_turns = turns.max_assistant_turns
        cls.max_parallel_calls = turns.max_parallel_calls
        cls.max_tool_response_length = turns.max_tool_response_length
        cls.tool_response_truncate_side = turns.tool_response_truncate_side
        cls.tool_parser_name = turns.format or "hermes"
        cls.tool_parser = ToolParser.get_tool_parser(cls.tool_parser_name, tokenizer)
        cls.prompt_length, cls.response_length = rollout.prompt_length, rollout.response_length
        cls.interaction_config_file = turns.interaction_config_path
        file = cls.interaction_config_file
        cls.interaction_map = initialize_interactions_from_config(file) if file else {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Call the handler of each state until one returns `TERMINATED`."""
        data = await self._begin(kwargs)
        state = AgentState.PENDING
        try:
            while state is not AgentState.TERMINATED:
                match state:
                    case AgentState.PENDING:
                        state = await self._handle_pending_state(data, sampling_params)
                    case AgentState.GENERATING:
                        state = await self._handle_generating_state(data, sampling_params)
                    case AgentState.PROCESSING_TOOLS:
                        state = await self._handle_processing_tools_state(data)
                    case AgentState.INTERACTING:
                        state = await self._handle_interacting_state(data)
        finally:
            if data.interaction is not None:
                await call_method(data.interaction.finalize_interaction, data.request_id)
        start, end = len(data.prompt_ids) - len(data.response_mask), self.response_length
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start:][:end],
            response_mask=data.response_mask[:end],
            response_logprobs=data.response_logprobs[:end] or None,
            multi_modal_data=None if data.image_data is None else {"image": data.image_data},
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=AgentLoopMetrics.model_validate(data.metrics),
            extra_fields={
                **data.extra_fields,
                "turn_scores": data.turn_scores,
                "tool_rewards": data.tool_rewards,
            },
        )

    async def _begin(self, row: dict[str, Any]) -> AgentData:
        """Read a row, and start its interaction."""
        kwargs, request_id = dict(row.get("interaction_kwargs") or {}), uuid4().hex
        source = row.get("data_source")
        interaction = select_interaction(self.interaction_map, kwargs, data_source=source)
        if interaction is not None:
            await call_method(interaction.start_interaction, request_id, **kwargs)
        return AgentData(
            messages=list(row["raw_prompt"]),
            image_data=copy.copy((row.get("multi_modal_data") or {}).get("image")),
            metrics={},
            request_id=request_id,
            tools_kwargs=row.get("tools_kwargs") or {},
            interaction=interaction,
            interaction_kwargs=kwargs,
        )

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        """Render the prompt."""
        agent_data.prompt_ids = await self.apply_chat_template(
            agent_data.messages, tools=self.tool_schemas
        )
        return AgentState.GENERATING

    async def _handle_generating_state(
        self,
        agent_data: AgentData,
        sampling_params: dict[str, Any],
        ignore_termination: bool = False,
    ) -> AgentState:
        """Sample a turn, and read its calls if no limit ends the request."""
        data = agent_data
        with simple_timer("generate_sequences", data.metrics):
            output = await self.server_manager.generate(
                request_id=data.request_id,
                prompt_ids=data.prompt_ids,
                sampling_params=sampling_params,
                image_data=data.image_data,
            )
        data.assistant_turns += 1
        data.response_ids = list(output.token_ids)
        data.prompt_ids = data.prompt_ids + data.response_ids
        data.response_mask += [1] * len(data.response_ids)
        data.response_logprobs += output.log_probs or []
        turns, users = self.max_assistant_turns, self.max_user_turns
        if (
            (len(data.response_mask) >= self.response_length and not ignore_termination)
            or (turns and data.assistant_turns >= turns)
            or (users and data.user_turns >= users)
        ):
            return AgentState.TERMINATED
        _, data.tool_calls = await self.tool_parser.extract_tool_calls(data.response_ids)
        if self.interaction_config_file:
            text = self.tokenizer.decode(data.response_ids, skip_special_tokens=True)
            data.messages.append({"role": "assistant", "content": text})
        if data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if self.interaction_config_file else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Execute all calls of the turn, and append their results."""
        calls = (self._call_tool(one, agent_data.tools_kwargs) for one in agent_data.tool_calls)
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(*calls)
        messages, images = list[dict[str, Any]](), list[Any]()
        for response, reward, _ in results:
            parts: list[dict[str, Any]] = [{"type": "image"} for _ in response.image or ()]
            images += response.image or ()
            text = {"type": "text", "text": response.text or ""}
            messages.append({"role": "tool", "content": [*parts, text] if parts else text["text"]})
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        if images:
            agent_data.image_data = [*(agent_data.image_data or ()), *images]
        return await self._append(agent_data, messages, images)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Ask the interaction, and append its reply if the conversation goes on."""
        interaction = agent_data.interaction
        if interaction is None:
            return AgentState.TERMINATED
        returned = await call_method(
            interaction.generate_response,
            agent_data.request_id,
            agent_data.messages,
            **agent_data.interaction_kwargs,
        )
        reply = InteractionResult.of(returned, interaction=interaction.name)
        if reply.score is not None:
            agent_data.turn_scores.append(reply.score)
        if reply.should_terminate:
            return AgentState.TERMINATED
        return await self._append(agent_data, [{"role": "user", "content": reply.content}], [])

    async def _append(
        self, data: AgentData, messages: list[dict[str, Any]], images: list[Any]
    ) -> AgentState:
        """Append messages to the conversation, unless they fill the response."""
        data.messages.extend(messages)
        ids = await self.apply_chat_template(
            messages, images=images or None, remove_system_prompt=True
        )
        if len(data.response_mask) + len(ids) >= self.response_length:
            return AgentState.TERMINATED
        data.prompt_ids = data.prompt_ids + ids
        data.response_mask += [0] * len(ids)
        if data.response_logprobs:
            data.response_logprobs += [0.0] * len(ids)
        data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any]
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Execute one call; an error becomes the text that the policy reads."""
        tool, instance_id = self.tools.get(tool_call.name), None
        try:
            if tool is None:
                raise AgentError(f"no tool {tool_call.name!r}")
            row = (tools_kwargs.get(tool_call.name) or {}).get("create_kwargs") or {}
            created = await call_method(tool.create, **create_arguments(tool.create, row))
            instance_id = created if isinstance(created, str) else created[0]
            arguments = json.loads(tool_call.arguments)
            response, reward, metrics = await call_method(tool.execute, instance_id, arguments)
        except Exception as error:  # noqa: BLE001 - as in verl: the policy reads it
            return ToolResponse(text=f"Error when executing tool: {error}"), 0.0, {}
        finally:
            if tool is not None and instance_id is not None:
                await call_method(tool.release, instance_id)
        return response.model_copy(update={"text": self._cut(response.text)}), reward, metrics

    def _cut(self, text: str | None) -> str | None:
        """Cut a tool's text to `max_tool_response_length` characters."""
        limit, side = self.max_tool_response_length, self.tool_response_truncate_side
        if not text or len(text) <= limit:
            return text
        if side == "left":
            return f"{text[:limit]}...(truncated)"
        if side == "right":
            return f"(truncated)...{text[-limit:]}"
        return f"{text[: limit // 2]}...(truncated)...{text[-(limit // 2) :]}"
