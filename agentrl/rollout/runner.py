"""Drive one request from PENDING to its end.

`run_request` is the error boundary around plug-ins and engine calls: it always returns a request
that has ended, and a failure is recorded on it (a failed request is data). Only a cancellation of
the caller is raised, after clean-up. Each live state has one handler. A handler returns the next
state, or the reason why the request ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from agentrl.config.schema.run import CompactionConfig
from agentrl.engines.protocol import Completion, CompletionSource, FinishReason
from agentrl.errors import DataError, EngineError, Fault, TemplateError, TransitionError, text_of
from agentrl.interactions.registry import select_interaction
from agentrl.interactions.session import InteractionSession
from agentrl.messages import CallOutcome, Message, ToolResponse
from agentrl.plugins.cancellation import is_cancelled, wait_despite_cancellation
from agentrl.rollout.compaction import continue_from_summary, count_no_space, media_of
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure, find_fault
from agentrl.rollout.records import MALFORMED_CALL, CallRecord, TokenDifference, Turn, unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import should_interact, turn_seed
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.subagents import Subagents
from agentrl.rollout.templates.delta import EncodedDelta
from agentrl.rollout.tool_calls import (
    CallIds,
    CheckedCalls,
    raise_tool_failure,
    read_turn,
    skip_calls,
)
from agentrl.rollout.tool_parsers.base import Span
from agentrl.tools.delegation import RUN_SUBAGENT
from agentrl.tools.registry import select_tools
from agentrl.tools.runtime.session import ToolSession

NextStep = RequestState | StopReason
"""What a handler returns: the next state, or the reason why the request ends."""

logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    """The time that the policy waited for an observation."""

    started: float
    """By the monotonic clock."""
    seconds: float


class EngineAbortError(EngineError):
    """The engine aborted a call. The request of the call ends as ABORTED."""


async def run_request(
    request: AsyncRolloutRequest,
    context: RolloutContext,
    source: CompletionSource | None = None,
    *,
    num_levels: int | None = None,
) -> AsyncRolloutRequest:
    """Drive a request through its states, in place, and return it ended.

    Args:
        request: A pending request.
        context: Engine, template, parser, tools and interactions of the run.
        source: Generates the completions; None: the engine of the context.
        num_levels: Levels of sub-agents that may be below the request; None: as the tools say.

    Raises:
        TransitionError: If the request is not pending.
        asyncio.CancelledError: If the caller cancels. The request has ended then (as ABORTED if it
            had not ended before), its tools are released and its interaction is finalized.
    """
    if request.state is not RequestState.PENDING:
        raise TransitionError(f"the request {request.request_id} is {request.state}, not pending")
    source = source or context.engine
    run = _Run(
        request, context, source, Subagents(request, context, source, run_request, num_levels)
    )
    started = time.monotonic()
    request.metrics["seconds_started"] = unix_time(started)
    try:
        await run.drive()
    except asyncio.CancelledError as error:
        run.fail(StopReason.ABORTED if is_cancelled() else StopReason.FAILED, error)
        if is_cancelled():
            raise
    except EngineAbortError as error:
        run.fail(StopReason.ABORTED, error)
    except Exception as error:  # noqa: BLE001 - the boundary: a failed request is data
        run.fail(StopReason.FAILED, error)
    finally:
        await run.release()
        request.metrics["seconds"] = time.monotonic() - started
    return request


class _Run:
    """One request while it runs: a handler for each state, its sessions, and the last turn."""

    def __init__(
        self,
        request: AsyncRolloutRequest,
        context: RolloutContext,
        source: CompletionSource,
        subagents: Subagents,
    ) -> None:
        self.request = request
        self.context = context
        self.source = source
        self.subagents = subagents
        self.tools = ToolSession({}, instance_id=request.request_id)
        self.interaction: InteractionSession | None = None
        self.last_ids: Sequence[int] = ()
        self.call_ids = CallIds()
        self.calls = CheckedCalls()
        self.call_spans: list[Span | None] = []
        self.texts: list[Callable[[], str]] = []
        """Return the text of each part of the ledger. The token check calls them."""
        self.opening: list[Message] = []
        """The messages of the first prompt."""
        self.opening_of_sequence: list[Message] = []
        """The messages of the current sequence's prompt."""
        self.num_compactions = 0

    async def drive(self) -> None:
        """Follow the states to an end within the wall clock, then collect the tools' rewards."""
        clock = asyncio.timeout(self.request.budgets.timeout_s)
        try:
            async with clock:
                step: NextStep = RequestState.PENDING
                while isinstance(step, RequestState):
                    step = await self._handle(step)
                    if isinstance(step, StopReason):
                        self.request.finish(step)
                    else:
                        self.request.take_edge(step)
        except TimeoutError as error:
            if not clock.expired():
                raise
            return self.fail(StopReason.WALL_CLOCK, error)
        self.request.tool_rewards = await self.tools.calc_rewards()
        return self._check_tokens(self.request)

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
                raise TransitionError(f"a request that is {state} has no handler")

    def fail(self, reason: StopReason, error: BaseException) -> None:
        """End the request as failed. If it has completed already, its scoring fails."""
        request = self.request
        is_limit = reason is not StopReason.FAILED
        fault = Fault.LIMIT if is_limit else find_fault(error, request.state)
        failure = describe_failure(error, fault, turn=len(request.turns))
        if request.state is RequestState.COMPLETED:
            request.fail_scoring(failure, reason)
        else:
            request.finish(reason, failure)

    async def release(self) -> None:
        """Release the tools and finalize the interaction, also if this task is cancelled."""
        self.request.metrics["release_failures"] = 0.0
        try:
            await self.subagents.wait()
        finally:
            self.subagents.attach()
            await self._release_plugins()

    async def _release_plugins(self) -> None:
        if self.interaction or self.tools.needs_release:
            task = asyncio.create_task(self._release())
            await wait_despite_cancellation([task])
            task.result()

    async def _release(self) -> None:
        if self.interaction is None:
            failures = await self.tools.release()
        else:
            released, finalized = await asyncio.gather(
                self.tools.release(), self.interaction.finalize(), return_exceptions=True
            )
            failures = [*(released if isinstance(released, list) else [released]), finalized]
        raised = [failure for failure in failures if failure is not None]
        messages = [text_of(failure).partition("\n")[0] for failure in raised]
        self.request.release_failures = messages
        self.request.metrics["release_failures"] = float(len(messages))

    def _check_tokens(self, request: AsyncRolloutRequest) -> None:
        """Compare the current sequence, which has ended, with its conversation."""
        try:
            self.context.check_tokens(request, lambda: [text() for text in self.texts])
        except Exception as error:  # noqa: BLE001 - a broken check must not fail the request
            what = f"{type(error).__name__}: {error}"
            request.differences.append(
                TokenDifference(turn=-1, kind="check_failed", expected="", actual=what)
            )

    # PENDING

    async def _start(self) -> NextStep:
        request, media = self.request, self.context.media
        await media.load_prompt(request)
        await self._create_tools()
        await self._start_interaction()
        prompt = await self.context.encode_prompt(request)
        request.begin(prompt.ids, prompt.runs)
        self.opening = self.opening_of_sequence = [*request.messages]
        self.texts.append(lambda: prompt.text)
        request.num_cut_prompt_tokens += prompt.num_cut
        if request.num_tokens_left <= 0:
            raise DataError(
                f"a prompt of {request.num_prompt_tokens} tokens leaves no room for a response",
                expected=f"less than {request.budgets.max_model_len} tokens",
            )
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
            offered={
                RUN_SUBAGENT: self.subagents.run,
                "prompt_images": list(request.multi_modal_data.get("image", ())),
            },
        )
        for opening in await self.tools.create():
            shown = context.caller.show(opening.response, tool=opening.tool)
            message, media = await context.media.show(shown.message, opening.response)
            request.messages.append(message)
            request.add_media(media)
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
                warn_opening_cut(selected.name, context.settings.max_tool_response_length)
            request.messages.append(Message(role="user", content=fitted.text))
            request.num_cut_prompt_tokens += fitted.num_cut

    # RUNNING

    async def _generate(self) -> NextStep:
        turns = self.request.turns
        if turns and turns[-1].is_compaction and (ends := await self._compact()):
            return ends
        started = time.monotonic()
        completion = await self._complete()
        turn = self._append_completion(completion, started)
        step = self._choose_step(turn)
        if step is not RequestState.TOOL_CALLING:
            self._record_calls(turn, skip_calls(self.calls))
        if step is StopReason.ABORTED:
            raise EngineAbortError("the engine aborted the call")
        return step

    async def _complete(self, max_tokens: int | None = None) -> Completion:
        request = self.request
        limit = request.max_next_tokens
        if max_tokens is not None:
            limit = min(max_tokens, request.num_tokens_left)
        completion = await self.source.generate(
            request.input_ids,
            replace(request.sampling, max_new_tokens=limit, seed=turn_seed(request)),
            request_id=request.request_id,
            media=request.media_spans,
        )
        if len(completion.token_ids) > limit:
            raise EngineError(
                f"the engine sampled {len(completion.token_ids)} tokens",
                expected=f"at most {limit}",
            )
        return completion

    def _append_completion(self, completion: Completion, started: float) -> Turn:
        """Append a completion to the ledger, and the message parsed from it to the conversation."""
        seconds = time.monotonic() - started
        request, context = self.request, self.context
        turn = request.append_sampled(
            completion.token_ids,
            completion.log_probs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=seconds,
            seconds_started=unix_time(started),
        )
        if completion.finish_reason is FinishReason.LENGTH:
            is_response = request.nearest_limit is StopReason.RESPONSE_BUDGET
            spent = "response" if is_response else "model"
            turn.cut = "turn" if request.num_tokens_left > 0 else spent
        read = read_turn(
            completion.token_ids,
            context.template,
            context.parser,
            tools=request.tool_schemas,
            check_arguments=context.settings.check_tool_arguments,
            # Earlier calls only: the new turn has no records yet.
            num_calls_before=request.num_tool_calls,
            prompt_end=request.tokens_before(turn),
            taken_ids=self.call_ids.update(request.messages),
        )
        self.texts.append(lambda: read.text)
        self.last_ids = completion.token_ids
        self.calls, self.call_spans = read.calls, read.call_spans
        request.messages.append(read.message)
        if self.calls.malformed and context.settings.on_malformed_call == "mask":
            request.exclude_turn(turn.index, MALFORMED_CALL)
        return turn

    def _choose_step(self, turn: Turn) -> NextStep:
        """Choose the step after a completion: call tools, ask the user, or end."""
        request, settings = self.request, self.context.settings
        if turn.finish_reason is FinishReason.ABORT:
            return StopReason.ABORTED
        if turn.cut in ("response", "model"):
            return request.nearest_limit
        if self.context.media.is_placeholder(self.last_ids):
            return StopReason.SAMPLED_PLACEHOLDER
        if self.calls.num_calls:
            policy, malformed = settings.on_malformed_call, self.calls.malformed
            is_unreadable = any(not call.is_readable for call in malformed)
            if (policy == "stop" and malformed) or (policy == "stop_unreadable" and is_unreadable):
                return StopReason.MALFORMED_CALL
            return request.limit_for_calls(self.calls.num_calls) or RequestState.TOOL_CALLING
        if self.interaction is None or request.num_assistant_turns % settings.interaction_interval:
            return StopReason.ANSWERED
        replies = should_interact(request, settings.interaction_prob)
        return RequestState.INTERACTING if replies else StopReason.ANSWERED

    def _record_calls(self, turn: Turn, records: list[CallRecord]) -> None:
        turn.calls = records
        for call, span in zip(records, self.call_spans, strict=True):
            call.span = span and (turn.start + span[0], turn.start + span[1])

    async def _compact(self) -> StopReason | None:
        """Have the policy write a summary, and begin the next sequence with it.

        Returns:
            The limit that ends the request, if the summary or the next prompt does not fit.
        """
        request, settings = self.request, self.context.settings.compaction
        assert settings is not None  # an instruction was appended
        started = time.monotonic()
        completion = await self._complete(settings.max_summary_tokens)
        turn = self._append_completion(completion, started)
        turn.is_compaction = True
        self._record_calls(turn, skip_calls(self.calls))
        if turn.finish_reason is FinishReason.ABORT:
            raise EngineAbortError("the engine aborted the call")
        if turn.cut in ("response", "model"):
            count_no_space(request, "summary")
            return request.nearest_limit
        turn.cut = turn.cut and "summary"
        *history, _, summary = request.messages[len(self.opening_of_sequence) :]
        return await self._begin_next(history, summary.text, settings)

    async def _begin_next(
        self, history: Sequence[Message], summary: str, settings: CompactionConfig
    ) -> StopReason | None:
        request, template = self.request, self.context.template
        messages = continue_from_summary(self.opening, history, summary, settings)
        planned = template.plan_prompt(messages, request.tool_schemas)
        ids, runs = await template.encode_planned(planned)
        if len(ids) >= request.budgets.max_model_len:
            count_no_space(request, "prompt")
            return StopReason.MODEL_LENGTH
        media = media_of(messages, self.opening, request.multi_modal_data)
        self._check_tokens(request.set_aside("compaction", messages))
        request.begin(ids, runs)
        request.add_media(media)
        self.texts = [lambda: planned.text]
        self.opening_of_sequence = messages
        self.num_compactions += 1
        return None

    # TOOL_CALLING

    async def _call_tools(self) -> NextStep:
        request, context = self.request, self.context
        turn = request.turns[-1]
        started = time.monotonic()
        try:
            # A tool may have effects. Do not execute a call whose answer the template cannot show.
            context.caller.check_answerable(self.calls, context.template, request.tool_schemas)
        except TemplateError as error:
            self._record_calls(turn, skip_calls(self.calls))
            _explain_unshown(turn, error)
            raise
        found = await context.caller.answer(self.calls, self.tools)
        self.subagents.attach()
        waited = Waiting(started, time.monotonic() - started)
        self._record_calls(turn, [observation.record for observation in found])
        rewards = [call.reward for call in turn.calls if call.reward is not None]
        if rewards:
            turn.reward = sum(rewards)
        if context.settings.on_tool_failure == "fail":
            raise_tool_failure(found)
        shown = [await context.media.show(one.message, one.response) for one in found]
        try:
            observed = await self._observe([message for message, _ in shown], "tool", waited)
        except TemplateError as error:
            _explain_unshown(turn, error)
            raise
        if observed:
            for _, media in shown:
                request.add_media(media)
        if any(observation.should_stop for observation in found):
            return StopReason.TOOL_ENDED
        return RequestState.RUNNING if observed else request.nearest_limit

    # INTERACTING

    async def _interact(self, session: InteractionSession) -> NextStep:
        request = self.request
        started = time.monotonic()
        reply = await session.respond(request.messages)
        waited = Waiting(started, time.monotonic() - started)
        judged = request.turns[-1]
        judged.reward, judged.metadata = reply.score, reply.metadata or {}
        if reply.should_terminate:
            return StopReason.INTERACTION_ENDED
        if limit := request.limit_for_reply():
            return limit
        response = ToolResponse.of(reply.content)
        fitted = self.context.fitter.fit(response.wording)
        message = Message(role="user", content=response.content(fitted.text))
        message, media = await self.context.media.show(message, response)
        turn = await self._observe([message], "user", waited)
        if turn is None:
            return request.nearest_limit
        request.add_media(media)
        turn.cut = "observation" if fitted.num_cut else None
        turn.num_cut_tokens = fitted.num_cut
        return RequestState.RUNNING

    # TOOL_CALLING and INTERACTING

    async def _observe(
        self, messages: Sequence[Message], role: Literal["tool", "user"], waited: Waiting
    ) -> Turn | None:
        """Append messages after a sampled turn, if at least one token is left after them.

        Returns:
            Their turn. None if they do not fit; nothing is appended then.
        """
        request = self.request
        delta = await self._encode_delta(messages)
        if len(delta.ids) >= request.num_tokens_left:
            return None
        shown, end = [*messages], len(delta.ids)
        if (instruction := self._instruction(end)) is not None:
            asking = await self._encode_delta([*messages, instruction])
            if len(asking.ids) < request.num_tokens_left:
                delta, shown = asking, [*messages, instruction]
                end = min(at for index, at, _ in delta.message_spans if index == len(messages))
            else:
                count_no_space(request, "instruction")
        self.texts.append(lambda: delta.written().text)
        request.messages.extend(shown)
        calls = request.turns[-1].calls
        for index, first, last in delta.message_spans:
            if role == "tool" and index < len(messages):
                calls[index].num_tokens += last - first
        runs = [run for run in delta.runs if run[1] <= end]
        turn = request.append_observed(
            delta.ids[:end],
            role=role,
            seconds=waited.seconds,
            seconds_started=unix_time(waited.started),
            runs=runs,
        )
        if end < len(delta.ids):
            request.append_observed(delta.ids[end:], role="user").is_compaction = True
        return turn

    async def _encode_delta(self, messages: Sequence[Message]) -> EncodedDelta:
        template = self.context.template
        planned = template.plan_delta(messages, tools=self.request.tool_schemas)
        return planned.encode(self.last_ids, await template.queue.encode(planned.outside))

    def _instruction(self, num_observed: int) -> Message | None:
        """Return the message that asks for a summary, if an observation passes the trigger."""
        request, settings = self.request, self.context.settings.compaction
        if settings is None or self.num_compactions >= settings.max_compactions:
            return None
        num_tokens = request.num_prompt_tokens + request.num_response_tokens + num_observed
        if num_tokens < settings.trigger_tokens:
            return None
        return Message(role="user", content=settings.instruction)


def _explain_unshown(turn: Turn, error: TemplateError) -> None:
    """Record that the template cannot show the answers to the calls, as those of two tools."""
    for call in turn.calls:
        is_skipped = call.outcome == CallOutcome.SKIPPED
        what = "not executed" if is_skipped else "not shown to the model"
        call.message = call.message or f"{what}: {error.args[0]}"


@cache
def warn_opening_cut(interaction: str, max_tokens: int) -> None:
    """Warn, once for each interaction, that its first message was cut."""
    logger.warning(
        "the first message of interaction %r was cut: it is longer than "
        "rollout.multi_turn.max_tool_response_length (%d tokens)",
        interaction,
        max_tokens,
    )
