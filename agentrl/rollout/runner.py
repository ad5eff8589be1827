"""Drive one request from PENDING to its end.

`run_request` is the only boundary at which a failure of a plug-in or an engine becomes data: it
never raises, whatever happens inside (cancellation excepted, which it passes on behind the
clean-up). One short handler belongs to each living state.
"""

import asyncio
import random
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.config.schema import MultiTurnConfig
from agentrl.engines.protocol import Engine, FinishReason
from agentrl.errors import Fault, InteractionError, ToolLifeError
from agentrl.interactions.base import BaseInteraction
from agentrl.interactions.life import InteractionSession
from agentrl.messages import FunctionCall, Message, OpenAIFunctionToolSchema, ToolCall, ToolResponse
from agentrl.rollout.request import AsyncRolloutRequest, Failure, Turn
from agentrl.rollout.states import FINAL_STATES, RequestState, StopReason
from agentrl.rollout.templates import ChatTemplate, check_ledger
from agentrl.rollout.tool_calls import Observation, ToolCaller
from agentrl.rollout.tool_parsers import ParsedTurn, ToolParser
from agentrl.tools.base import BaseTool
from agentrl.tools.life import ToolSession


class PromptEncoder(Protocol):
    """Renders a request's prompt within its budget (the manager's, which caches by group)."""

    def __call__(self, request: AsyncRolloutRequest) -> Sequence[int]:
        """Return the prompt's tokens, generation prompt included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all requests of a run share."""

    engine: Engine
    template: ChatTemplate
    parser: ToolParser
    encode_prompt: PromptEncoder
    settings: MultiTurnConfig
    tools: Mapping[str, BaseTool]
    interactions: Mapping[str, BaseInteraction]


async def run_request(request: AsyncRolloutRequest, house: House) -> AsyncRolloutRequest:
    """Drive a request through its states, in place, and return it ended.

    Raises:
        asyncio.CancelledError: where the caller cancels; the request has then ended as ABORTED,
            its tools are released and its interaction is finalised.
    """
    run = _Run(request, house)
    started = time.monotonic()
    try:
        async with asyncio.timeout(request.budgets.timeout_s) as clock:
            await run.drive()
    except TimeoutError as error:
        late = StopReason.WALL_CLOCK if clock.expired() else StopReason.FAILED
        run.fail(late, error)
    except asyncio.CancelledError as error:
        run.fail(StopReason.ABORTED, error)
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: a failure becomes data (law 5)
        run.fail(StopReason.FAILED, error)
    finally:
        await run.close()
        request.metrics["seconds"] = time.monotonic() - started
    return request


_FAULT_IN_STATE = {
    RequestState.PENDING: Fault.TOOL,
    RequestState.RUNNING: Fault.ENGINE,
    RequestState.TOOL_CALLING: Fault.TOOL,
    RequestState.INTERACTING: Fault.INTERACTION,
}


def _fault_of(error: BaseException, state: RequestState) -> Fault:
    if isinstance(error, InteractionError):
        return Fault.INTERACTION
    if isinstance(error, ToolLifeError):
        return Fault.TOOL
    return _FAULT_IN_STATE[state]


def describe_failure(error: BaseException, fault: Fault, turn: int) -> Failure:
    """Record an exception: whose fault, what, and where it came from."""
    return Failure(
        fault=fault,
        kind=type(error).__name__,
        message=str(error)[:2000],
        turn=turn,
        traceback="".join(traceback.format_exception(error))[-4000:],
    )


class _Run:
    """One request on its way: the handlers of its states, and what must be released behind it."""

    def __init__(self, request: AsyncRolloutRequest, house: House) -> None:
        self.request = request
        self.house = house
        self.parsed = ParsedTurn()
        self.num_answers = 0
        self.tools: ToolSession | None = None
        self.interaction: InteractionSession | None = None

    async def drive(self) -> None:
        while self.request.state not in FINAL_STATES:
            match self.request.state:
                case RequestState.PENDING:
                    await self._start()
                case RequestState.RUNNING:
                    await self._generate()
                case RequestState.TOOL_CALLING:
                    await self._call_tools()
                case RequestState.INTERACTING:
                    await self._interact()

    def fail(self, reason: StopReason, error: BaseException) -> None:
        request = self.request
        if request.is_finished:
            return
        limit = reason is not StopReason.FAILED
        fault = Fault.LIMIT if limit else _fault_of(error, request.state)
        request.finish(reason, describe_failure(error, fault, len(request.turns)))

    async def close(self) -> None:
        """Ask the tools for their rewards, then release everything; never raises."""
        if self.tools is not None:
            if self.request.state is RequestState.COMPLETED:
                await self._collect_tool_rewards(self.tools)
            await self.tools.release()
        if self.interaction is not None:
            await self.interaction.finalize()
        if self.request.state is RequestState.COMPLETED:
            self._check_tokens()

    async def _collect_tool_rewards(self, tools: ToolSession) -> None:
        try:
            self.request.tool_rewards = await tools.calc_rewards()
        except ToolLifeError as error:
            turn = len(self.request.turns)
            self.request.fail_scoring(describe_failure(error, Fault.TOOL, turn))

    # PENDING

    async def _start(self) -> None:
        request, house = self.request, self.house
        tools = select_tools(house.tools, request.tool_selection)
        request.tool_schemas = [tool.get_openai_tool_schema() for tool in tools]
        if tools:
            self.tools = ToolSession(
                {tool.name: tool for tool in tools},
                instance_id=request.request_id,
                tools_kwargs=request.tools_kwargs,
                timeout_s=house.settings.tool_timeout_s,
                max_parallel_calls=house.settings.max_parallel_calls,
            )
            for name, response in await self.tools.create():
                request.messages.append(tool_message(name, response, ""))
        if house.interactions and request.interaction_kwargs:
            self.interaction = InteractionSession(
                find_interaction(house.interactions, request.interaction_kwargs),
                instance_id=request.request_id,
                kwargs=request.interaction_kwargs,
                timeout_s=house.settings.interaction_timeout_s,
            )
            await self.interaction.start()
        request.begin(house.encode_prompt(request))
        request.take_edge(RequestState.RUNNING)

    # RUNNING

    async def _generate(self) -> None:
        request, engine = self.request, self.house.engine
        left = request.num_tokens_left
        limit = min(left, request.budgets.max_turn_tokens or left)
        if limit <= 0:
            return request.finish(self._length_reason())
        started = time.monotonic()
        completion = await engine.generate(
            request.input_ids,
            replace(request.sampling, max_new_tokens=limit),
            request_id=request.request_id,
        )
        turn = request.append_sampled(
            completion.token_ids,
            completion.log_probs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=time.monotonic() - started,
        )
        self._read_turn(turn, completion.token_ids)
        if completion.finish_reason is FinishReason.ABORT:
            return self.fail(StopReason.ABORTED, RuntimeError("the engine aborted the call"))
        return self._leave_generation(turn)

    def _read_turn(self, turn: Turn, ids: Sequence[int]) -> None:
        """Parse what was sampled, and add it to the conversation as the parser read it."""
        house, request = self.house, self.request
        text = house.template.decode_turn(ids)
        self.parsed = house.parser.parse(
            text, starts_in_thought=house.template.starts_in_thought, tools=request.tool_schemas
        )
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in self.parsed.calls
        ]
        content = self.parsed.content
        request.messages.append(
            Message(role="assistant", content=content, tool_calls=calls or None)
        )

    def _leave_generation(self, turn: Turn) -> None:
        request, budgets = self.request, self.request.budgets
        if turn.finish_reason is FinishReason.LENGTH and request.num_tokens_left <= 0:
            turn.cut = str(self._length_reason())
            return request.finish(self._length_reason())
        if turn.finish_reason is FinishReason.LENGTH:
            turn.cut = "max_turn_tokens"
        if not self.parsed.num_calls:
            return self._leave_answer()
        if self.parsed.malformed and self.house.settings.on_malformed_call == "stop":
            self._skip_calls(turn)
            return request.finish(StopReason.MALFORMED_CALL)
        if _used_up(request.num_tool_calls + self.parsed.num_calls - 1, budgets.max_tool_calls):
            self._skip_calls(turn)
            return request.finish(StopReason.MAX_TOOL_CALLS)
        if _used_up(request.num_assistant_turns, budgets.max_assistant_turns):
            self._skip_calls(turn)
            return request.finish(StopReason.MAX_ASSISTANT_TURNS)
        return request.take_edge(RequestState.TOOL_CALLING)

    def _leave_answer(self) -> None:
        self.num_answers += 1
        if self.interaction is None or not self._is_answer_heard():
            return self.request.finish(StopReason.ANSWERED)
        return self.request.take_edge(RequestState.INTERACTING)

    def _is_answer_heard(self) -> bool:
        settings = self.house.settings
        if self.num_answers % settings.interaction_interval:
            return False
        draw = random.Random(f"{self.request.seed}:{self.num_answers}").random()
        return draw < settings.interaction_prob

    def _skip_calls(self, turn: Turn) -> None:
        turn.calls.extend(self.house.tool_caller.skipped(self.parsed))

    def _length_reason(self) -> StopReason:
        budget = self.request.budgets
        full = self.request.num_response_tokens >= budget.max_response_tokens
        return StopReason.RESPONSE_BUDGET if full else StopReason.MODEL_LENGTH
