"""`ToolAgentLoop` of verl's name: it drives requests, and subclasses replace its handlers."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from agentrl.compat.verl.experimental.agent_loop.tool_agent_loop import (
    AgentData,
    AgentState,
    ToolAgentLoop,
)

from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.messages import ToolResponse
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.tools.calculator_tool import CalculatorTool
from tests.fakes.plugins import make_context, make_engine, make_request, tiny_tokenizer

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
UNKNOWN = '<tool_call>{"name": "oracle", "arguments": {}}</tool_call>'


class Teacher(BaseInteraction):
    ended: ClassVar[list[str]] = []

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        is_done = "5" in str(messages[-1]["content"])
        return InteractionResult(is_done, "Try again.", 1.0 if is_done else 0.25)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.ended.append(instance_id)


def drive(
    loop: type[ToolAgentLoop], *answers: str, row: dict[str, Any] | None = None, **turns: Any
) -> AsyncRolloutRequest:
    config = RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 900, "max_response_length": turns.pop("budget", 600)},
            "model": {"path": "folder/policy"},
            "rollout": {"multi_turn": {"format": "hermes", **turns}},
        }
    )
    # Each class is initialized once in a process, and each test has another configuration.
    fresh = type(loop.__name__, (loop,), {})
    context = make_context(make_engine(*answers), tools=[CalculatorTool({})])
    runner = AgentLoopRunner(LoopEntry("theirs", fresh), config, tiny_tokenizer())
    request = make_request(**(row or {}))
    return asyncio.run(runner(request, context, context.engine))


def num_assistant(request: AsyncRolloutRequest) -> int:
    return sum(turn.role == "assistant" for turn in request.turns)


def text_of(request: AsyncRolloutRequest) -> str:
    return tiny_tokenizer().decode(request.response_ids)


def test_tools_are_called_and_only_sampled_tokens_are_trained():
    request = drive(ToolAgentLoop, CALL, "It is 5.")
    assert request.state is RequestState.COMPLETED, request.error
    sampled = [i for i, m in zip(request.response_ids, request.loss_mask, strict=True) if m]
    assert tiny_tokenizer().decode(sampled).replace("<|im_end|>", "") == CALL + "It is 5."
    assert "5" in text_of(request).split("It is")[0].split("</tool_call>")[1]


@pytest.mark.parametrize(
    ("limits", "answers", "num_turns"),
    [
        ({"max_assistant_turns": 1}, [CALL, "It is 5."], 1),
        ({"max_user_turns": 1}, [CALL, CALL, "It is 5."], 2),
        ({"max_assistant_turns": 3}, [CALL, CALL, CALL, CALL], 3),
        ({"budget": 70}, [CALL, "It is 5."], 1),
    ],
)
def test_limits_end_the_loop(limits: dict[str, Any], answers: list[str], num_turns: int):
    request = drive(ToolAgentLoop, *answers, **limits)
    assert request.state is RequestState.COMPLETED, request.error
    assert num_assistant(request) == num_turns


def test_a_call_of_an_unknown_tool_is_an_error_that_the_policy_reads():
    assert "no tool 'oracle'" in text_of(drive(ToolAgentLoop, UNKNOWN, "Sorry."))


class OwnTool(ToolAgentLoop):
    async def _call_tool(self, tool_call: Any, tools_kwargs: Any) -> Any:
        return ToolResponse(text=f"own {tool_call.name}"), 0.5, {}


class OwnGenerating(ToolAgentLoop):
    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: Any, ignore_termination: bool = False
    ) -> AgentState:
        state = await super()._handle_generating_state(agent_data, sampling_params)
        agent_data.extra_fields["states"] = [
            *agent_data.extra_fields.get("states", ()), state.value,
        ]  # fmt: skip
        return AgentState.TERMINATED if agent_data.assistant_turns == 2 else state


class OwnPending(ToolAgentLoop):
    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: Any
    ) -> AgentState:
        agent_data.messages.append({"role": "user", "content": "own pending"})
        return await super()._handle_pending_state(agent_data, sampling_params)


class OwnProcessing(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        agent_data.tool_rewards.append(9.0)
        return AgentState.TERMINATED


class OwnInteracting(ToolAgentLoop):
    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        agent_data.turn_scores.append(7.0)
        return AgentState.TERMINATED


@pytest.mark.parametrize(
    ("loop", "key", "value"),
    [
        (OwnTool, "tool_rewards", [0.5]),
        (OwnGenerating, "states", ["processing_tools", "terminated"]),
        (OwnProcessing, "tool_rewards", [9.0]),
    ],
)
def test_a_subclass_replaces_a_handler(loop: type[ToolAgentLoop], key: str, value: Any):
    request = drive(loop, CALL, "It is 5.")
    assert request.state is RequestState.COMPLETED, request.error
    assert request.columns[key] == value
    assert ("own calculator" in text_of(request)) is (loop is OwnTool)


def test_a_subclass_changes_the_prompt():
    prompt = tiny_tokenizer().decode(drive(OwnPending, "Yes.").prompt_ids)
    assert "own pending" in prompt


@pytest.mark.parametrize(
    ("loop", "scores", "num_turns"), [(ToolAgentLoop, [0.25, 1.0], 2), (OwnInteracting, [7.0], 1)]
)
def test_the_rows_interaction_replies_and_is_finalized(
    tmp_path: Path, loop: type[ToolAgentLoop], scores: list[float], num_turns: int
):
    file = tmp_path / "interactions.yaml"
    file.write_text(
        "interaction:\n  - {name: teacher, config: {}, "
        f"class_name: {Teacher.__module__}.Teacher}}\n"
    )
    Teacher.ended.clear()
    row = {"interaction_kwargs": {"name": "teacher"}}
    request = drive(loop, "It is 4.", "It is 5.", row=row, interaction_config_path=str(file))
    assert request.state is RequestState.COMPLETED, request.error
    assert request.columns["turn_scores"] == scores
    assert (num_assistant(request), len(Teacher.ended)) == (num_turns, 1)
