"""Drive one request from PENDING to its end.

`run_request` is the one boundary at which a failure of a plug-in or an engine becomes data (a
failed request is data): whatever happens inside, it returns a request that has ended. Cancellation
alone passes through, behind the clean-up. Each living state has one handler, which says where the
request goes next: to another state, or to its end.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from agentrl.engines.protocol import Completion, CompletionSource, FinishReason
from agentrl.errors import (
    DataError,
    EngineError,
    Fault,
    TemplateError,
    TransitionError,
    text_of,
)
from agentrl.interactions.registry import select_interaction
from agentrl.interactions.session import InteractionSession
from agentrl.messages import CallOutcome, Message
from agentrl.plugins.cancellation import finish_despite_cancellation, is_cancelled
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure, find_fault
from agentrl.rollout.limits import turn_limit, why_not_call, why_not_reply
from agentrl.rollout.records import CallRecord, TokenDifference, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import should_interact, turn_seed
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.tool_calls import (
    CheckedCalls,
    Observation,
    raise_tool_failure,
    read_turn,
    skip_calls,
)
from agentrl.rollout.tool_parsers.base import Span
from agentrl.tools.registry import select_tools
from agentrl.tools.runtime.session import ToolSession

NextStep = RequestState | StopReason
"""Where a request goes next."""


logger = logging.getLogger(__name__)


class EngineAbortError(EngineError):
    """The engine was told to end a call, and with it its request."""


async def run_request(
    request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource | None = None
) -> AsyncRolloutRequest:
    """Drive a request through its states, in place, and return it ended.

    `source` completes its turns; None: the context's engine.

    Raises:
        TransitionError: for a request that is not pending.
        asyncio.CancelledError: where the caller cancels. The request has then ended, as ABORTED
            unless it had before, its tools are released and its interaction is finalised.
    """
    if request.state is not RequestState.PENDING:
        raise TransitionError(f"the request {request.request_id} is {request.state}, not pending")
    run = _Run(request, context, source or context.engine)
    started = time.monotonic()
    try:
        await run.drive()
    except asyncio.CancelledError as error:
        run.fail(StopReason.ABORTED if is_cancelled() else StopReason.FAILED, error)
        if is_cancelled():
            raise
    except EngineAbortError as error:
        run.fail(StopReason.ABORTED, error)
    except Exception as error:  # noqa: BLE001 - the boundary: a failure becomes data (a failed request is data)
        run.fail(StopReason.FAILED, error)
    finally:
        await run.release()
        request.metrics["seconds"] = time.monotonic() - started
    return request


class _Run:
    """One request on its step: the handlers of its states, and what is released behind it."""

    def __init__(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> None:
        self.request = request
        self.context = context
        self.source = source
        self.last_ids: Sequence[int] = ()
        self.wording: list[Callable[[], str]] = []
        self.calls = CheckedCalls()
        self.call_spans: list[Span | None] = []
        self.tools = ToolSession({}, instance_id=request.request_id)
        self.interaction: InteractionSession | None = None

    async def drive(self) -> None:
        """Follow the states to an end, within the wall clock; then ask for the tools' rewards."""
        clock = asyncio.timeout(self.request.budgets.timeout_s)
        try:
            async with clock:
                await self._follow_states()
        except TimeoutError as error:
            if not clock.expired():
                raise
            return self.fail(StopReason.WALL_CLOCK, error)
        self.request.tool_rewards = await self.tools.calc_rewards()
        return self._check_tokens()

    async def _follow_states(self) -> None:
        step: NextStep = RequestState.PENDING
        while isinstance(step, RequestState):
            step = await self._handle(step)
            self._go(step)

    async def _handle(self, state: RequestState) -> NextStep:
        match state:
            case RequestState.PENDING:
                return await self._start()
            case RequestState.RUNNING:
                return await self._generate()
            case RequestState.TOOL_CALLING:
                return await self._call_tools()
            case RequestState.INTERACTING if self.interaction:
                return await self._interact(self.interaction)
            case _:
                raise TransitionError(f"nothing is to be done for a request that is {state}")

    def _go(self, step: NextStep) -> None:
        if isinstance(step, StopReason):
            self.request.finish(step)
        else:
            self.request.take_edge(step)

    def fail(self, reason: StopReason, error: BaseException) -> None:
        """End a request as failed; one that had completed fails its scoring."""
        request = self.request
        is_limit = reason is not StopReason.FAILED
        fault = Fault.LIMIT if is_limit else find_fault(error, request.state)
        failure = describe_failure(error, fault, turn=len(request.turns))
        if request.state is RequestState.COMPLETED:
            request.fail_scoring(failure, reason)
        else:
            request.finish(reason, failure)

    async def release(self) -> None:
        """Release the tools and finalise the interaction, also where this is cancelled."""
        self.request.metrics["release_failures"] = 0.0
        if self.interaction or self.tools.needs_release:
            await finish_despite_cancellation(self._release())

    async def _release(self) -> None:
        releasing = self.tools.release()
        if self.interaction is None:
            failures = await releasing
        else:
            released, finalized = await asyncio.gather(
                releasing, self.interaction.finalize(), return_exceptions=True
            )
            failures = [*(released if isinstance(released, list) else [released]), finalized]
        told = [text_of(failure).partition("\n")[0] for failure in failures if failure is not None]
        self.request.release_failures = told
        self.request.metrics["release_failures"] = float(len(told))

    def _check_tokens(self) -> None:
        request = self.request
        try:
            self.context.check_tokens(request, lambda: [write() for write in self.wording])
        except Exception as error:  # noqa: BLE001 - a check that breaks loses no good request
            what = f"{type(error).__name__}: {error}"
            broken = TokenDifference(turn=-1, kind="check_failed", expected="", actual=what)
            request.differences.append(broken)

    # PENDING

    async def _start(self) -> NextStep:
        await self._create_tools()
        await self._start_interaction()
        self._begin()
        return RequestState.RUNNING

    async def _create_tools(self) -> None:
        request, context = self.request, self.context
        tools = select_tools(
            context.tools,
            tool_selection=request.tool_selection,
            tools_kwargs=request.tools_kwargs,
            per_row=context.settings.tools_per_row,
        )
        request.tool_schemas = [tool.tool_schema for tool in tools]
        self.tools = ToolSession(
            {tool.name: tool for tool in tools},
            instance_id=request.request_id,
            tools_kwargs=request.tools_kwargs,
            timeout_s=context.settings.tool_timeout_s,
            max_parallel_calls=context.settings.max_parallel_calls,
        )
        for opening in await self.tools.create():
            shown = context.caller.show(opening.response, tool=opening.tool)
            request.messages.append(shown.message)
            request.add_media(opening.response.media)
            request.num_cut_prompt_tokens += shown.num_cut

    async def _start_interaction(self) -> None:
        request, context = self.request, self.context
        selected = select_interaction(
            context.interactions, request.interaction_kwargs, data_source=request.data_source
        )
        if selected is None:
            return
        self.interaction = InteractionSession(
            selected,
            instance_id=request.request_id,
            kwargs=request.interaction_kwargs,
            offered={"ground_truth": request.ground_truth, "uid": request.uid},
            timeout_s=context.settings.interaction_timeout_s,
        )
        if opening := await self.interaction.start():
            fitted = context.fitter.fit(opening)
            if fitted.num_cut:
                warn_of_cut_opening(selected.name, context.settings.max_tool_response_length)
            request.messages.append(Message(role="user", content=fitted.text))
            request.num_cut_prompt_tokens += fitted.num_cut

    def _begin(self) -> None:
        request = self.request
        prompt = self.context.encode_prompt(request)
        request.begin(prompt.ids)
        self.wording.append(lambda: prompt.text)
        request.num_cut_prompt_tokens += prompt.num_cut
        if request.num_tokens_left <= 0:
            raise DataError(
                f"a prompt of {request.num_prompt_tokens} tokens leaves no room for a response",
                expected=f"less than {request.budgets.max_model_len} tokens",
            )

    # RUNNING

    async def _generate(self) -> NextStep:
        started = time.monotonic()
        completion = await self._complete()
        turn = self._append(completion, time.monotonic() - started)
        step = self._leave_turn(turn)
        if step is not RequestState.TOOL_CALLING:
            self._note_calls(turn, skip_calls(self.calls))
        if step is StopReason.ABORTED:
            raise EngineAbortError("the engine was told to abort the call")
        return step

    async def _complete(self) -> Completion:
        request = self.request
        limit = turn_limit(request)
        completion = await self.source.generate(
            request.input_ids,
            replace(request.sampling, max_new_tokens=limit, seed=turn_seed(request)),
            request_id=request.request_id,
        )
        if len(completion.token_ids) > limit:
            raise EngineError(
                f"the engine sampled {len(completion.token_ids)} tokens", expected=f"{limit}"
            )
        return completion

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
        if completion.finish_reason is FinishReason.LENGTH:
            turn.cut = "turn" if request.num_tokens_left > 0 else self._spent_budget()
        self.last_ids = completion.token_ids
        self._read(completion.token_ids)
        if self.calls.malformed and self.context.settings.on_malformed_call == "mask":
            request.exclude_turn(turn.index, "malformed tool call")
        return turn

    def _spent_budget(self) -> Literal["response", "model"]:
        nearest = self.request.nearest_limit
        return "response" if nearest is StopReason.RESPONSE_BUDGET else "model"

    def _read(self, ids: Sequence[int]) -> None:
        request, context = self.request, self.context
        read = read_turn(
            ids,
            context.template,
            context.parser,
            tools=request.tool_schemas,
            check_arguments=context.settings.check_tool_arguments,
            num_calls_before=request.num_tool_calls,
        )
        self.wording.append(lambda: read.text)
        self.calls, self.call_spans = read.calls, read.call_spans
        request.messages.append(read.message)

    def _leave_turn(self, turn: Turn) -> NextStep:
        """Where a completion leads."""
        if turn.finish_reason is FinishReason.ABORT:
            return StopReason.ABORTED
        if turn.cut in ("response", "model"):
            return self.request.nearest_limit
        if self.calls.num_calls:
            return self._why_not_call() or RequestState.TOOL_CALLING
        return RequestState.INTERACTING if self._is_heard() else StopReason.ANSWERED

    def _why_not_call(self) -> StopReason | None:
        """The policy or limit that ends the request where the model wants to call a tool."""
        policy = self.context.settings.on_malformed_call
        if policy == "stop" and self.calls.malformed:
            return StopReason.MALFORMED_CALL
        unreadable = any(not call.is_readable for call in self.calls.malformed)
        if policy == "stop_unreadable" and unreadable:
            return StopReason.MALFORMED_CALL
        return why_not_call(self.request, self.calls.num_calls)

    def _is_heard(self) -> bool:
        """Whether there is an interaction, and interval and draw let it hear this answer."""
        request, settings = self.request, self.context.settings
        if self.interaction is None or request.num_assistant_turns % settings.interaction_interval:
            return False
        return should_interact(request, settings.interaction_prob)

    # TOOL_CALLING

    async def _call_tools(self) -> NextStep:
        started = time.monotonic()
        try:
            # A tool may have effects: no call is executed that the template could not answer.
            outline = self.context.caller.outline(self.calls)
            self.context.template.plan_delta(outline, tools=self.request.tool_schemas)
        except TemplateError as error:
            self._note_calls(self.request.turns[-1], skip_calls(self.calls))
            return self._refuse_calls(self.request.turns[-1], error)
        found = await self.context.caller.answer(self.calls, self.tools)
        seconds = time.monotonic() - started
        self._record_calls(self.request.turns[-1], found)
        if self.context.settings.on_tool_failure == "fail":
            raise_tool_failure(found)
        try:
            observed = await self._observe([o.message for o in found], "tool", seconds)
        except TemplateError as error:
            return self._refuse_calls(self.request.turns[-1], error)
        if observed:
            for observation in found:
                self.request.add_media(observation.response.media)
        if any(observation.should_stop for observation in found):
            return StopReason.TOOL_ENDED
        return RequestState.RUNNING if observed else self.request.nearest_limit

    def _record_calls(self, turn: Turn, found: Sequence[Observation]) -> None:
        self._note_calls(turn, [observation.record for observation in found])
        rewards = [call.reward for call in turn.calls if call.reward is not None]
        if rewards:
            turn.reward = sum(rewards)

    def _note_calls(self, turn: Turn, records: list[CallRecord]) -> None:
        turn.calls = records
        for call, span in zip(records, self.call_spans, strict=True):
            call.span = span and (turn.start + span[0], turn.start + span[1])

    def _refuse_calls(self, turn: Turn, error: TemplateError) -> StopReason:
        """The model made calls that its template cannot answer, such as two tools in one turn."""
        for call in turn.calls:
            what = (
                "not executed" if call.outcome == CallOutcome.SKIPPED else "not shown to the model"
            )
            call.message = call.message or f"{what}: {error.args[0]}"
        return StopReason.MALFORMED_CALL

    # INTERACTING

    async def _interact(self, session: InteractionSession) -> NextStep:
        request = self.request
        started = time.monotonic()
        reply = await session.respond(request.messages)
        seconds = time.monotonic() - started
        judged = request.turns[-1]
        judged.reward, judged.metadata = reply.score, reply.metadata or {}
        if reply.should_terminate:
            return StopReason.INTERACTION_ENDED
        return why_not_reply(request) or await self._reply(reply.content, seconds)

    async def _reply(self, text: str, seconds: float) -> NextStep:
        fitted = self.context.fitter.fit(text)
        turn = await self._observe([Message(role="user", content=fitted.text)], "user", seconds)
        if turn is None:
            return self.request.nearest_limit
        turn.cut = "observation" if fitted.num_cut else None
        turn.num_cut_tokens = fitted.num_cut
        return RequestState.RUNNING

    # What the policy is shown.

    async def _observe(
        self, messages: Sequence[Message], role: Literal["tool", "user"], seconds: float
    ) -> Turn | None:
        """Append messages behind a sampled turn, where they leave room for one more token.

        Returns:
            Their turn; None where they do not fit, and nothing was appended.
        """
        request, template = self.request, self.context.template
        planned = template.plan_delta(messages, tools=request.tool_schemas)
        outside = await template.queue.encode(planned.outside)
        delta = planned.encode(self.last_ids, outside)
        if len(delta.ids) >= request.num_tokens_left:
            return None
        self.wording.append(lambda: delta.written().text)
        request.messages.extend(messages)
        calls = request.turns[-1].calls
        for index, start, end in delta.message_spans:
            if role == "tool":
                calls[index].num_tokens += end - start
        return request.append_observed(delta.ids, role=role, seconds=seconds)


@cache
def warn_of_cut_opening(interaction: str, max_tokens: int) -> None:
    """Log, once for each interaction, that what it says first was cut."""
    logger.warning(
        "the first message of interaction %r is longer than "
        "rollout.multi_turn.max_tool_response_length, %d tokens, and is cut",
        interaction,
        max_tokens,
    )
