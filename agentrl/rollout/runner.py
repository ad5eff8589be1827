"""Drive one request from PENDING to its end.

`run_request` is the one boundary at which a failure of a plug-in or an engine becomes data (law 5):
whatever happens inside, it returns a request that has ended. Cancellation alone passes through,
behind the clean-up. One short handler belongs to each living state.
"""

import asyncio
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.config.schema import MultiTurnConfig
from agentrl.engines.protocol import Completion, Engine, FinishReason
from agentrl.errors import DataError, Fault, InteractionError, ToolLifeError
from agentrl.interactions.base import BaseInteraction
from agentrl.interactions.life import InteractionSession
from agentrl.messages import Message
from agentrl.rollout.observations import TextFitter
from agentrl.rollout.records import Failure, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import FINAL_STATES, RequestState, StopReason
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.tool_calls import Observation, ToolCaller, as_tool_call
from agentrl.rollout.tool_parsers import ParsedTurn, ToolParser
from agentrl.tools.base import BaseTool
from agentrl.tools.life import ToolSession
from agentrl.tools.registry import select_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all requests of a run share."""

    engine: Engine
    template: ChatTemplate
    parser: ToolParser
    caller: ToolCaller
    fitter: TextFitter
    tools: Sequence[BaseTool]
    interactions: Mapping[str, BaseInteraction]
    settings: MultiTurnConfig
    encode_prompt: Callable[[AsyncRolloutRequest], Sequence[int]]
    """Renders a request's prompt within its budget."""
    check_tokens: Callable[[AsyncRolloutRequest], None]
    """Holds a finished ledger against its conversation, and records what differs."""


async def run_request(request: AsyncRolloutRequest, house: House) -> AsyncRolloutRequest:
    """Drive a request through its states, in place, and return it ended.

    Raises:
        asyncio.CancelledError: where the caller cancels. The request has then ended as ABORTED,
            its tools are released and its interaction is finalised.
    """
    run = _Run(request, house)
    started = time.monotonic()
    try:
        async with asyncio.timeout(request.budgets.timeout_s) as clock:
            await run.drive()
    except TimeoutError as error:
        run.fail(StopReason.WALL_CLOCK if clock.expired() else StopReason.FAILED, error)
    except asyncio.CancelledError as error:
        run.fail(StopReason.ABORTED, error)
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: a failure becomes data (law 5)
        run.fail(StopReason.FAILED, error)
    finally:
        await run.close()
        request.metrics["seconds"] = time.monotonic() - started
    return request


class _Run:
    """One request on its way: the handlers of its states, and what is released behind it."""

    def __init__(self, request: AsyncRolloutRequest, house: House) -> None:
        self.request = request
        self.house = house
        self.parsed = ParsedTurn()
        self.num_answers = 0
        self.tools = ToolSession({}, instance_id=request.request_id)
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
                case _:
                    await self._interact()

    def fail(self, reason: StopReason, error: BaseException) -> None:
        """End a request that still lives; whose fault it is follows from error and state."""
        request = self.request
        if request.state in FINAL_STATES:
            return
        limit = reason is not StopReason.FAILED
        fault = Fault.LIMIT if limit else fault_of(error, request.state)
        request.finish(reason, describe_failure(error, fault, turn=len(request.turns)))

    async def close(self) -> None:
        """Ask the tools for their rewards, then release everything."""
        await self._collect_tool_rewards()
        failures = await self.tools.release()
        self.request.metrics["release_failures"] = float(len(failures))
        if self.interaction is not None:
            await self.interaction.finalize()
        if self.request.state is RequestState.COMPLETED:
            self.house.check_tokens(self.request)

    async def _collect_tool_rewards(self) -> None:
        if self.request.state is not RequestState.COMPLETED:
            return
        try:
            self.request.tool_rewards = await self.tools.calc_rewards()
        except ToolLifeError as error:
            turn = len(self.request.turns)
            self.request.fail_scoring(describe_failure(error, Fault.TOOL, turn=turn))

    # PENDING

    async def _start(self) -> None:
        request, house = self.request, self.house
        await self._create_tools()
        await self._start_interaction()
        request.begin(house.encode_prompt(request))
        request.take_edge(RequestState.RUNNING)

    async def _create_tools(self) -> None:
        request, settings = self.request, self.house.settings
        tools = select_tools(
            self.house.tools,
            tool_selection=request.tool_selection,
            tools_kwargs=request.tools_kwargs,
        )
        self.tools = ToolSession(
            {tool.name: tool for tool in tools},
            instance_id=request.request_id,
            tools_kwargs=request.tools_kwargs,
            timeout_s=settings.tool_timeout_s,
            max_parallel_calls=settings.max_parallel_calls,
        )
        request.tool_schemas = [tool.tool_schema for tool in tools]
        for opening in await self.tools.create():
            fitted = self.house.fitter.fit(opening.response.text or "")
            request.messages.append(Message(role="tool", content=fitted.text, name=opening.tool))

    async def _start_interaction(self) -> None:
        request = self.request
        if not (self.house.interactions and request.interaction_kwargs):
            return
        self.interaction = InteractionSession(
            find_interaction(self.house.interactions, request.interaction_kwargs),
            instance_id=request.request_id,
            kwargs=request.interaction_kwargs,
            timeout_s=self.house.settings.interaction_timeout_s,
        )
        await self.interaction.start()

    # RUNNING

    async def _generate(self) -> None:
        request = self.request
        limit = self._turn_limit()
        if limit <= 0:
            return request.finish(self._length_reason())
        started = time.monotonic()
        completion = await self.house.engine.generate(
            request.input_ids,
            replace(request.sampling, max_new_tokens=limit),
            request_id=request.request_id,
        )
        turn = self._append(completion, time.monotonic() - started)
        if completion.finish_reason is FinishReason.ABORT:
            return request.finish(StopReason.ABORTED)
        if completion.finish_reason is FinishReason.LENGTH:
            turn.cut = "response" if request.num_tokens_left <= 0 else "turn"
        if turn.cut == "response":
            self._skip_calls(turn)
            return request.finish(self._length_reason())
        return self._leave_answer() if not self.parsed.num_calls else self._leave_calls(turn)

    def _turn_limit(self) -> int:
        left = self.request.num_tokens_left
        return min(left, self.request.budgets.max_turn_tokens or left)

    def _append(self, completion: Completion, seconds: float) -> Turn:
        """Enter a completion into the ledger, and what the parser reads in it into the messages."""
        request = self.request
        turn = request.append_sampled(
            completion.token_ids,
            completion.log_probs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=seconds,
        )
        self.parsed = self._read(completion.token_ids)
        calls = [as_tool_call(call) for call in self.parsed.calls]
        content = self.parsed.content
        request.messages.append(
            Message(role="assistant", content=content, tool_calls=calls or None)
        )
        return turn

    def _read(self, ids: Sequence[int]) -> ParsedTurn:
        """Read a turn without its stop token; where there are no tools, nothing is a call."""
        template, schemas = self.house.template, self.request.tool_schemas
        ended = bool(ids) and ids[-1] in template.stop_token_ids
        text = template.decode(ids[:-1] if ended else ids)
        if not schemas:
            return ParsedTurn(text)
        return self.house.parser.parse(
            text, starts_in_thought=template.starts_in_thought, tools=schemas
        )

    def _leave_calls(self, turn: Turn) -> None:
        """A turn with calls: execute them, unless a limit or policy ends the request here."""
        reason = self._why_not_call()
        if reason is not None:
            self._skip_calls(turn)
            return self.request.finish(reason)
        return self.request.take_edge(RequestState.TOOL_CALLING)

    def _why_not_call(self) -> StopReason | None:
        request, budgets = self.request, self.request.budgets
        if self.parsed.malformed and self.house.settings.on_malformed_call == "stop":
            return StopReason.MALFORMED_CALL
        if is_over(request.num_tool_calls + self.parsed.num_calls, budgets.max_tool_calls):
            return StopReason.MAX_TOOL_CALLS
        if is_over(request.num_assistant_turns + 1, budgets.max_assistant_turns):
            return StopReason.MAX_ASSISTANT_TURNS
        return None

    def _leave_answer(self) -> None:
        """A turn without calls: put it to the interaction, where there is one that listens."""
        self.num_answers += 1
        if self.interaction is None or not self._is_heard():
            return self.request.finish(StopReason.ANSWERED)
        return self.request.take_edge(RequestState.INTERACTING)

    def _is_heard(self) -> bool:
        settings = self.house.settings
        if self.num_answers % settings.interaction_interval:
            return False
        draw = random.Random(f"{self.request.seed}:{self.num_answers}").random()
        return draw < settings.interaction_prob

    def _skip_calls(self, turn: Turn) -> None:
        turn.calls = self.house.caller.skipped(self.parsed)

    def _length_reason(self) -> StopReason:
        full = self.request.num_response_tokens >= self.request.budgets.max_response_tokens
        return StopReason.RESPONSE_BUDGET if full else StopReason.MODEL_LENGTH

    # TOOL_CALLING

    async def _call_tools(self) -> None:
        request, house = self.request, self.house
        sampled = request.turns[-1]
        started = time.monotonic()
        found = await house.caller.answer(self.parsed, request.tool_schemas, self.tools)
        seconds = time.monotonic() - started
        sampled.calls = [observation.record for observation in found]
        sampled.reward = sum_rewards([record.reward for record in sampled.calls])
        self._apply_malformed_policy(sampled)
        fits = self._observe([self._fitted(observation) for observation in found], seconds)
        if any(observation.should_stop for observation in found):
            return request.finish(StopReason.TOOL_ENDED)
        if not fits:
            return request.finish(self._overflow_reason())
        return request.take_edge(RequestState.RUNNING)

    def _apply_malformed_policy(self, turn: Turn) -> None:
        is_malformed = any(record.outcome == "malformed" for record in turn.calls)
        if is_malformed and self.house.settings.on_malformed_call == "mask":
            self.request.exclude_turn(turn.index, "malformed tool call")

    def _fitted(self, observation: Observation) -> Message:
        """Cut an observation to its budget, and record the cut."""
        fitted = self.house.fitter.fit(observation.message.text)
        observation.record.num_cut_tokens = fitted.num_cut
        return observation.message.model_copy(update={"content": fitted.text})

    # INTERACTING

    async def _interact(self) -> None:
        request, session = self.request, self.interaction
        if session is None:
            raise InteractionError("a request without an interaction is INTERACTING")
        started = time.monotonic()
        reply = await session.respond(request.messages)
        seconds = time.monotonic() - started
        sampled = request.turns[-1]
        sampled.reward = sum_rewards([sampled.reward, reply.score])
        if reply.should_terminate:
            return request.finish(StopReason.INTERACTION_ENDED)
        if is_over(request.num_user_turns + 1, request.budgets.max_user_turns):
            return request.finish(StopReason.MAX_USER_TURNS)
        if is_over(request.num_assistant_turns + 1, request.budgets.max_assistant_turns):
            return request.finish(StopReason.MAX_ASSISTANT_TURNS)
        text = self.house.fitter.fit(reply.content).text
        if not self._observe([Message(role="user", content=text)], seconds):
            return request.finish(self._overflow_reason())
        return request.take_edge(RequestState.RUNNING)

    # What the policy is shown.

    def _observe(self, messages: Sequence[Message], seconds: float) -> bool:
        """Append messages behind a sampled turn, where they leave room for one more token.

        Returns:
            Whether they fit; what does not fit is not appended at all.
        """
        request = self.request
        sampled = request.turns[-1]
        delta = self.house.template.encode_delta(
            messages,
            last_ids=request.response_ids[sampled.start : sampled.end],
            tools=request.tool_schemas,
        )
        if len(delta.ids) >= request.num_tokens_left:
            return False
        role: Literal["tool", "user"] = "tool" if sampled.calls else "user"
        request.append_observed(delta.ids, role=role, seconds=seconds)
        request.messages.extend(messages)
        for index, start, end in delta.message_spans:
            if sampled.calls:
                sampled.calls[index].num_tokens += end - start
        return True

    def _overflow_reason(self) -> StopReason:
        """Which limit an observation would have crossed."""
        request = self.request
        of_response = request.budgets.max_response_tokens - request.num_response_tokens
        is_response = of_response <= request.num_tokens_left
        return StopReason.RESPONSE_BUDGET if is_response else StopReason.MODEL_LENGTH


_FAULT_IN_STATE = {
    RequestState.PENDING: Fault.TOOL,
    RequestState.RUNNING: Fault.ENGINE,
    RequestState.TOOL_CALLING: Fault.TOOL,
    RequestState.INTERACTING: Fault.INTERACTION,
}


def fault_of(error: BaseException, state: RequestState) -> Fault:
    """Say whose fault an exception is, by its type, or by the state in which it came."""
    if isinstance(error, InteractionError):
        return Fault.INTERACTION
    if isinstance(error, DataError):
        return Fault.LIMIT
    return Fault.TOOL if isinstance(error, ToolLifeError) else _FAULT_IN_STATE[state]


def describe_failure(error: BaseException, fault: Fault, *, turn: int) -> Failure:
    """Record an exception: whose fault, what it said, where it came from."""
    return Failure(
        fault=fault,
        kind=type(error).__name__,
        message=str(error)[:2000],
        turn=turn,
        traceback="".join(traceback.format_exception(error))[-4000:],
    )


def find_interaction(
    interactions: Mapping[str, BaseInteraction], kwargs: Mapping[str, object]
) -> BaseInteraction:
    """Find the interaction that a row names; a run with one only needs no name.

    Raises:
        DataError: naming the interactions that there are.
    """
    name = kwargs.get("name")
    if name is None and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name not in interactions:
        raise DataError(
            f"the row asks for the interaction {name!r}",
            key="extra_info.interaction_kwargs.name",
            expected=f"one of {', '.join(sorted(interactions))}",
        )
    return interactions[str(name)]


def is_over(count: int, limit: int | None) -> bool:
    """Whether a count is beyond a limit that there may not be."""
    return limit is not None and count > limit


def sum_rewards(rewards: Sequence[float | None]) -> float | None:
    """Add the rewards that there are; None where there are none."""
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None
