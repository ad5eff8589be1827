"""Loops that are written in the styles of verl 0.6.1 and 0.9.1, against verl's module names."""

import asyncio
import importlib
import json
from typing import Any
from uuid import uuid4

import pytest
from agentrl.compat.verl.experimental.agent_loop import get_trajectory_info
from agentrl.compat.verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AsyncLLMServerManager,
    ToolListWrap,
)
from agentrl.compat.verl.experimental.agent_loop.tool_parser import ToolParser
from agentrl.compat.verl.experimental.agent_loop.utils import build_gpt_oss_tool_response_text
from agentrl.compat.verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from agentrl.compat.verl.tools.schemas import ToolResponse
from agentrl.compat.verl.utils.profiler import simple_timer
from agentrl.compat.verl.workers.rollout.replica import TokenOutput

from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from agentrl.tools.calculator_tool import CalculatorTool
from tests.fakes.plugins import make_context, make_engine, make_request, tiny_tokenizer

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
ANSWERS = (CALL, "It is 5.")


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 900, "max_response_length": 600},
            "model": {"path": "folder/policy"},
            "rollout": {"multi_turn": {"format": "hermes", "max_assistant_turns": 4}},
        }
    )


async def drive(loop: type[AgentLoopBase]) -> AsyncRolloutRequest:
    context = make_context(make_engine(*ANSWERS), tools=[CalculatorTool({})])
    runner = AgentLoopRunner(LoopEntry("theirs", loop), config(), tiny_tokenizer())
    return await runner(make_request(), context, context.engine)


class Loop061(AgentLoopBase):
    """Tokenizes by itself, prepares classwide state in `init_class`, appends in place."""

    parser: Any
    response_length: int

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        if cls._class_initialized:
            return
        cls._class_initialized = True
        rollout = config.actor_rollout_ref.rollout
        cls.response_length = rollout.response_length
        cls.parser = ToolParser.get_tool_parser(rollout.multi_turn.format, tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages, metrics, request_id = list(kwargs["raw_prompt"]), {}, uuid4().hex
        ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True
            ),
        )
        mask, log_probs = [], []
        while True:
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=sampling_params,
                    image_data=None,
                )  # fmt: skip
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            _, calls = await self.parser.extract_tool_calls(output.token_ids)
            if not calls:
                break
            answer = f"<|im_start|>tool\n{calls[0].arguments}<|im_end|>\n<|im_start|>assistant\n"
            new = self.tokenizer.encode(answer, add_special_tokens=False)
            ids += new
            mask += [0] * len(new)
            log_probs += [0.0] * len(new)
        response_ids = ids[-len(mask) :]
        return AgentLoopOutput(
            prompt_ids=ids[: len(ids) - len(mask)],
            response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=log_probs[: self.response_length],
            multi_modal_data={},
            num_turns=4,
            metrics=metrics,
        )


class Loop091(AgentLoopBase):
    """Uses the helpers of the base class and the tools that the worker loaded."""

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in (tools.tools if tools else [])}
        self.schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            for tool in self.tools.values()
        ]
        parser_name = self.rollout_config.multi_turn.format
        self.tool_parser = ToolParser.get_tool_parser(parser_name, self.tokenizer)

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        media = await self.process_multi_modal_info(messages)
        self._assert_mm_supported(bool(media))
        ids = await self.ct_build_initial_tokens(
            messages, tools=self.schemas, images=media.get("images"), mm_inputs_out={}
        )
        mask: list[int] = []
        log_probs: list[float] | None = []
        calls: list[Any] = []
        while True:
            output: TokenOutput = await self.server_manager.generate(
                request_id="own", prompt_ids=ids, sampling_params=sampling_params,
                image_data=media.get("images"), video_data=None, audio_data=None,
                mm_processor_kwargs=self._get_mm_processor_kwargs(None), priority=priority,
                mm_processor_output=None,
            )  # fmt: skip
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, log_probs, assistant_logprobs=output.log_probs
            )
            ids = merged.token_ids
            content, calls = await self.tool_parser.extract_tool_calls(output.token_ids)
            if not calls:
                break
            before = [*messages, {"role": "assistant", "content": content}]
            tool = self.tools[calls[0].name]
            assert not isinstance(tool, FunctionTool)
            instance_id, _ = await tool.create(create_kwargs={})
            response, _, _ = await tool.execute(
                instance_id, json.loads(calls[0].arguments), agent_data=self
            )
            await tool.release(instance_id)
            messages = [*before, {"role": "tool", "content": response.text}]
            merged, mask, log_probs = await self.ct_merge_context_msg(
                before, messages, ids, mask, log_probs, tools=self.schemas
            )
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=ids[: -len(mask)],
            response_ids=ids[-len(mask) :],
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=4,
            metrics={"num_preempted": -1},
            extra_fields=output.extra_fields,
        )


class ChatModel:
    """Keeps the tokens in the metadata of its messages, as chat models of graphs do."""

    def __init__(self, client: AsyncLLMServerManager, tokenizer: Any) -> None:
        assert isinstance(client, AsyncLLMServerManager)
        self.client, self.tokenizer = client, tokenizer

    async def ainvoke(self, messages: list[dict[str, Any]], params: Any) -> dict[str, Any]:
        last = next((m for m in reversed(messages) if m["role"] == "assistant"), None)
        if last is None:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            request_id, mask = str(uuid4()), []
        else:
            data = last["response_metadata"]
            request_id, ids, mask = (data.pop(k) for k in ("request_id", "prompt_ids", "mask"))
            text = f"<|im_start|>tool\n{messages[-1]['content']}<|im_end|>\n<|im_start|>assistant\n"
            new = self.tokenizer.encode(text, add_special_tokens=False)
            ids += new
            mask += [0] * len(new)
        output = await self.client.generate(request_id, prompt_ids=ids, sampling_params=params)
        ids += output.token_ids
        mask += [1] * len(output.token_ids)
        data = {"request_id": request_id, "prompt_ids": ids, "mask": mask}
        text = self.tokenizer.decode(output.token_ids)
        return {"role": "assistant", "content": text, "response_metadata": data}


class GraphLoop(AgentLoopBase):
    """A graph of two nodes; tokens are in the messages, log-probabilities are left out."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        assert self.config.actor_rollout_ref.model.path == "folder/policy"
        model = ChatModel(self.server_manager, self.tokenizer)
        while True:
            messages.append(await model.ainvoke(messages, sampling_params))
            if "<tool_call>" not in messages[-1]["content"]:
                break
            messages.append({"role": "tool", "content": "5"})
        data = messages[-1]["response_metadata"]
        num = len(data["mask"])
        return AgentLoopOutput(
            prompt_ids=data["prompt_ids"][:-num],
            response_ids=data["prompt_ids"][-num:],
            response_mask=data["mask"],
            num_turns=4,
            metrics={},
        )


@pytest.mark.parametrize("loop", [Loop061, Loop091, GraphLoop])
async def test_a_loop_in_verls_style_trains_exactly_what_was_sampled(loop: type[AgentLoopBase]):
    request = await drive(loop)
    assert request.error is None
    assert request.stop_reason is StopReason.ANSWERED
    assert [turn.role for turn in request.turns] == ["assistant", "user", "assistant"]
    sampled = [
        token for token, bit in zip(request.response_ids, request.loss_mask, strict=True) if bit
    ]
    expected = [f"{answer}<|im_end|>" for answer in ANSWERS]
    assert tiny_tokenizer().decode(sampled) == "".join(expected)
    assert request.messages[-1].text == "It is 5."


async def test_a_loop_of_091_makes_the_state_machines_tokens():
    tools = [CalculatorTool({})]
    own = await run_request(make_request(), make_context(make_engine(*ANSWERS), tools=tools))
    theirs = await drive(Loop091)
    assert (theirs.prompt_ids, theirs.response_ids) == (own.prompt_ids, own.response_ids)
    assert (theirs.loss_mask, theirs.rollout_log_probs) == (own.loss_mask, own.rollout_log_probs)


def test_the_output_of_a_call_is_also_a_list_of_ids():
    output = TokenOutput(token_ids=[4, 5])
    assert [*output, len(output), output[0], output[:1]] == [4, 5, 2, 4, [4]]


def test_an_unknown_tool_parser_is_an_error():
    with pytest.raises(ConfigError, match="hermess"):
        ToolParser.get_tool_parser("hermess", tiny_tokenizer())


def test_what_function_tools_return_is_read():
    text = ToolResponse(text="a")
    assert normalize_function_tool_return((text, None)) == (text, 0.0, {})
    assert normalize_function_tool_return({"a": 1})[0].text == '{"a": 1}'
    assert normalize_function_tool_return(("a", 0.5, {"b": 1}))[1:] == (0.5, {"b": 1})
    with pytest.raises(TypeError, match="length 4"):
        normalize_function_tool_return((1, 2, 3, 4))


def test_samples_of_one_prompt_are_numbered():
    found = asyncio.run(get_trajectory_info(3, [7, 7, 8], False))
    assert [one["rollout_n"] for one in found] == [0, 1, 0]
    assert found[0] == {"step": 3, "sample_index": 7, "rollout_n": 0, "validate": False}


def test_the_texts_of_gpt_oss():
    text = build_gpt_oss_tool_response_text([{"content": "5"}], ["add"])
    assert text.startswith("<|start|>functions.add to=assistant")
    assert text.endswith("5<|end|><|start|>assistant")


def test_a_module_that_verl_has_and_agentrl_has_not_is_named():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("agentrl.compat.verl.experimental.agent_loop.prometheus_utils")
