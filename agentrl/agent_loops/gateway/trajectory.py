"""Sample the calls of one agent, each in the sequence that its history continues. No HTTP.

    ChatCall -> match the history -> continue, branch or begin a sequence -> engine -> ChatReply

A call continues the sampled tokens exactly if its history says what was sampled: the new messages
are appended as a delta, and no sampled token is rendered again (train what was sampled). A history
that continues from an earlier completion, or a second time from the same one, becomes a sequence of
its own that starts with the same tokens (`branch`). Any other history is rendered as a new prompt
(`rewrite`). Tokens that a sequence copies are in its prompt, so each sampled token is trained once.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Literal

from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply, SentCall, SentMessage
from agentrl.agent_loops.gateway.histories import HistoryTree, Match, Node, split_thought, tidy
from agentrl.agent_loops.gateway.limits import AgentThread
from agentrl.agent_loops.gateway.prompts import TooLongError, encode_prompt
from agentrl.agent_loops.gateway.sequences import (
    Point,
    TokenSequence,
    check_tokens,
    exclude_unused,
    write_sequences,
)
from agentrl.config.schema.agent import GatewayConfig
from agentrl.engines.protocol import Completion, CompletionSource, FinishReason
from agentrl.errors import EngineError, TemplateError
from agentrl.messages import CallOutcome, Message, OpenAIFunctionToolSchema
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.records import MALFORMED_CALL, BranchCause, Turn, unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.templates.assistant_turn import THOUGHT_FIELDS
from agentrl.rollout.templates.delta import PlannedDelta
from agentrl.rollout.tool_calls import CallIds, CompletedTurn, read_turn, skip_calls

_UNLIMITED = 1 << 30
_MAX_COUNTS = 128
"""Names of counts of one agent; further ones of its own fields are counted as `ignored_other`."""
_reply_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """Where a call samples: the sequence, and what precedes the completion."""

    sequence: TokenSequence
    shown: list[Message]
    """The new messages, as the template gets them."""
    num_cut: int
    """Tokens that they lost to the budget of observations."""
    after: Node[Point]
    """The node after which the completion is stored."""
    point: Point | None = None
    """The completion after which the new messages follow; None: they are a prompt."""
    delta: PlannedDelta | None = None
    is_branch: bool = False
    """Whether the sequence begins with a copy of the tokens up to `point`."""
    role: Literal["tool", "user"] = "user"
    """`tool` if the new messages have results of tools."""


class Trajectory:
    """Samples the calls of one agent, and keeps their tokens.

    Args:
        request: The request of the agent, running. It gets its sequences in `finish`.
        context: Template, parser and budgets' helpers of the run.
        source: Generates the completions. Calls run one at a time if it is not the run's engine.
        settings: What of the trajectory is trained.

    Attributes:
        counts: Calls, sequences by cause, differences, cuts and options without effect, by name.
        cut: The budget that refused or cut the last call; None if none did.
        error: Why the engine failed in the last call; None if it did not.
        thread: For the large calls of the agent.
    """

    def __init__(
        self,
        request: AsyncRolloutRequest,
        context: RolloutContext,
        source: CompletionSource,
        *,
        settings: GatewayConfig | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.cut: StopReason | None = None
        self.error: Exception | None = None
        self.thread = AgentThread()
        self._request = request
        self._context = context
        self._source = source
        self._settings = settings or GatewayConfig()
        self._sequences: list[TokenSequence] = []
        self._tree = HistoryTree[Point](lambda point: point.is_free)
        self._side_tree = HistoryTree[Point](lambda point: point.is_free)
        self._nodes: dict[Point, Node[Point]] = {}
        self._replies: dict[str, Node[Point]] = {}
        self._opened: dict[Node[Point], list[TokenSequence]] = {}
        self._running: list[_Plan] = []
        self._planning = asyncio.Lock()
        self._num_completions = 0
        self._num_tool_calls = 0
        self._call_ids = CallIds()
        self._inputs: Counter[bytes] = Counter()
        # A scheduler of deterministic runs takes one call of a request at a time.
        self._turnstile = asyncio.Semaphore(_UNLIMITED if source is context.engine else 1)

    async def complete(self, call: ChatCall) -> tuple[ChatReply, Point]:
        """Sample the completion of a call.

        Raises:
            CallError: If a budget is spent, the template cannot render the messages, or the engine
                fails.
        """
        async with self._planning:
            self._refuse_if_spent()
            is_large = call.is_large or call.previous_reply
            plan = (
                await self.thread.run(partial(self._plan, call)) if is_large else self._plan(call)
            )
            plan.sequence.is_busy = True
            self._running.append(plan)
        started = time.monotonic()
        try:
            observed = await self._encode(plan)
            self._check_length(plan, len(observed))
            completion = await self._generate(plan, observed, call)
            async with self._planning:
                reply, point = self._append(plan, observed, completion, call, started)
        except CallError as error:
            if isinstance(error, TooLongError):
                self._record_cut(error.budget, plan.sequence)
            await self._forget(plan)
            raise
        except EngineError as error:
            self.error = error
            self.counts["engine_errors"] += 1
            raise CallError(
                f"the engine failed: {error}", status=503, code="engine_error"
            ) from None
        finally:
            plan.sequence.is_busy = False
            self._running.remove(plan)
        self.error = None
        return reply, point

    async def count_input_tokens(self, call: ChatCall) -> int:
        """Return the number of tokens of a call's history as a prompt. Nothing is recorded.

        Raises:
            CallError: If the template cannot render the messages, or they are too long to count.
        """

        def show() -> list[Message]:
            history, _ = tidy(self._whole_history(call))
            return [self._show_in_prompt(message) for message in history]

        is_large = call.is_large or call.previous_reply
        shown = await self.thread.run(show) if is_large else show()
        limit, template = self._request.budgets.max_model_len, self._context.template
        return len(await encode_prompt(shown, call.tools, template, limit, self.thread))

    # Where a call samples

    def _refuse_if_spent(self) -> None:
        budgets = self._request.budgets
        turns, calls = budgets.max_assistant_turns, budgets.max_tool_calls
        if turns is not None and self._num_completions + len(self._running) >= turns:
            what, limit = f"max_assistant_turns, {turns}", StopReason.MAX_ASSISTANT_TURNS
        elif calls is not None and self._num_tool_calls > calls:
            what, limit = f"max_tool_calls, {calls}", StopReason.MAX_TOOL_CALLS
        else:
            return
        self._record_cut(limit, None)
        raise CallError(f"the budget {what}, is spent", status=403, code="budget_exceeded")

    def _record_cut(self, limit: StopReason, sequence: TokenSequence | None) -> None:
        if sequence is None or sequence.cause != "side_call":
            self.cut = limit
        self.counts[f"cut_{limit}"] += 1

    def _plan(self, call: ChatCall) -> _Plan:
        """Choose the sequence of a call, one call at a time, so that no two choose the same.

        A large call is planned on a thread. `_planning` keeps completions out of the tree then.
        """
        is_side = any(fnmatchcase(call.model, one) for one in self._settings.untrained_models)
        tree = self._side_tree if is_side else self._tree
        match = tree.match(self._whole_history(call), call.tools)
        for difference, number in match.differences.items():
            self.counts[str(difference)] += number
        for node in (match.completion or match.nearest).path():
            if node.sampled is not None:
                node.sampled.is_continued = True
        if match.completion is not None:
            try:
                return self._plan_delta(match, match.completion, call.tools)
            except TemplateError:
                self.counts["unrenderable_delta"] += 1
        return self._plan_prompt(match, call.tools, is_side=is_side)

    async def _forget(self, plan: _Plan) -> None:
        """Remove the messages of a prompt that was refused: they may be megabytes."""
        async with self._planning:
            if plan.delta is not None or self._opened.get(plan.after) != [plan.sequence]:
                return
            del self._opened[plan.after]
            if self._sequences[-1] is plan.sequence:
                self._sequences.pop()
            plan.after.is_prompt = False
            used = {other.after for other in self._running if other is not plan}
            for node in list(plan.after.path()):
                is_kept = node.children or node.sampled or node.is_prompt or node in used
                if node.parent is None or is_kept:
                    return
                node.parent.children.remove(node)

    def _whole_history(self, call: ChatCall) -> Sequence[SentMessage]:
        """Return the messages of a call, after those of the reply that they follow, if any.

        The instructions of earlier calls are left out: a call has its own.

        Raises:
            CallError: If there is no such reply.
        """
        if not call.previous_reply:
            return call.messages
        node = self._replies.get(call.previous_reply)
        if node is None:
            raise CallError(
                f"no response resp_{call.previous_reply} of this key",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        path = [one.message for one in node.path() if one.message is not None]
        kept = [message for message in path[::-1] if not message.is_instructions]
        own = [message for message in call.messages if message.is_instructions]
        return [*own, *kept, *call.messages[len(own) :]]

    def _plan_delta(
        self, match: Match[Point], node: Node[Point], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> _Plan:
        """Plan to continue after a completion.

        Raises:
            TemplateError: If the template does not support the new messages after a completion.
        """
        assert node.sampled is not None
        assert node.message is not None
        point, sequence = node.sampled, node.sampled.sequence
        ids = dict(
            zip(
                [call.id for call in match.messages[node.depth - 1].calls],
                [call.id for call in node.message.calls],
                strict=True,
            )
        )
        shown, num_cut = self._show(match.new_messages, ids, point.turn)
        known = sequence.record.tool_schemas
        delta = self._context.template.plan_delta(shown, tools=known)
        is_branch = not point.is_free
        if is_branch:
            cause = "side_call" if sequence.cause == "side_call" else "branch"
            sequence = self._begin_sequence(cause, sequence, known)
            sequence.copied = point
        return _Plan(
            sequence=sequence,
            shown=shown,
            num_cut=num_cut,
            after=self._tree.add(match.new_messages, tools, after=node),
            point=point,
            delta=delta,
            is_branch=is_branch,
            role="tool" if any(m.role == "tool" for m in match.new_messages) else "user",
        )

    def _show(
        self, messages: Sequence[SentMessage], ids: dict[str, str], turn: Turn | None
    ) -> tuple[list[Message], int]:
        """Make the messages that the policy is shown, each cut to the budget of an observation.

        Args:
            messages: New messages after a completion.
            ids: Ids of the calls: the client's, and those of the policy.
            turn: The completion; its records of calls get the outcome.

        Returns:
            The messages, and the number of tokens that were cut.
        """
        parser, shown, total = self._context.parser, list[Message](), 0
        records = {record.call_id: record for record in turn.calls} if turn else {}
        for message in messages:
            fitted = self._context.fitter.fit(message.text)
            total += fitted.num_cut
            self.counts["cut_observation"] += fitted.num_cut > 0
            if message.role != "tool":
                shown.append(Message(role=message.role, content=fitted.text))
                continue
            call_id = ids.get(message.call_id, message.call_id)
            if record := records.get(call_id):
                record.num_cut_tokens = fitted.num_cut
                if record.outcome is CallOutcome.SKIPPED:
                    record.outcome, record.num_attempts = CallOutcome.OK, 1
            text = parser.render_result(fitted.text)
            result = replace(message, text=text, call_id=call_id).to_message()
            is_tool = parser.result_role == "tool"
            shown.append(result if is_tool else Message(role=parser.result_role, content=text))
        return shown, total

    def _plan_prompt(
        self, match: Match[Point], tools: Sequence[OpenAIFunctionToolSchema], *, is_side: bool
    ) -> _Plan:
        """Plan to begin a sequence with the whole history as its prompt."""
        opened = self._opened.get(match.same_prompt, []) if match.same_prompt else []
        unused = next((one for one in opened if not (one.is_busy or one.points)), None)
        tree = self._side_tree if is_side else self._tree
        after = match.same_prompt or tree.add(match.messages, tools)
        if unused is None:
            parent = opened[0] if opened else self._find_nearest(match.nearest)
            cause = "branch" if opened else "rewrite" if parent else None
            cause = "side_call" if is_side else cause
            unused = self._begin_sequence(cause, parent, list(tools))
            self._opened.setdefault(after, []).append(unused)
            after.is_prompt = True
        shown = [self._show_in_prompt(message) for message in match.messages]
        return _Plan(sequence=unused, shown=shown, num_cut=0, after=after)

    def _show_in_prompt(self, message: SentMessage) -> Message:
        parser = self._context.parser
        if message.role != "tool":
            return message.to_message()
        text = parser.render_result(message.text)
        if parser.result_role != "tool":
            return Message(role=parser.result_role, content=text)
        return replace(message, text=text).to_message()

    def _find_nearest(self, nearest: Node[Point]) -> TokenSequence | None:
        """Return the sequence with the longest common history: the parent of a new prompt."""
        for node in nearest.path():
            if node.sampled is not None:
                return node.sampled.sequence
            if node.parent is not None and (below := _first_below(node)):
                return below.sequence
        return next((one for one in self._sequences if one.cause != "side_call"), None)

    def _begin_sequence(
        self,
        cause: BranchCause | None,
        parent: TokenSequence | None,
        tools: list[OpenAIFunctionToolSchema],
    ) -> TokenSequence:
        request, number = self._request, len(self._sequences)
        record = AsyncRolloutRequest(
            request_id=f"{request.request_id}#{number}",
            messages=[],
            tool_schemas=tools,
            data_source=request.data_source,
            sampling=request.sampling,
            budgets=request.budgets,
            seed=request.seed,
        )
        record.take_edge(RequestState.RUNNING)
        engine_id = record.request_id if number else request.request_id
        sequence = TokenSequence(record, engine_id, cause, parent)
        self._sequences.append(sequence)
        if cause is not None:
            self.counts[f"sequences_{cause}"] += 1
        return sequence

    # Tokens

    async def _encode(self, plan: _Plan) -> list[int]:
        """Encode what precedes the completion, and begin a new sequence; return a delta's tokens.

        Raises:
            CallError: If the template refuses the messages of a prompt.
        """
        template, record = self._context.template, plan.sequence.record
        if plan.delta is None:
            if not record.prompt_ids:
                limit = record.budgets.max_model_len
                ids = await encode_prompt(
                    plan.shown, record.tool_schemas, template, limit, self.thread
                )
                if len(ids) >= limit:
                    raise TooLongError(len(ids), limit, StopReason.MODEL_LENGTH)
                record.begin(ids)
                record.messages = plan.shown
            return []
        assert plan.point is not None
        outside = await template.queue.encode(plan.delta.outside)
        encoded = plan.delta.encode(plan.point.completion_ids, outside)
        for index, start, end in encoded.message_spans:
            for call in plan.point.turn.calls:
                if call.call_id == plan.shown[index].tool_call_id:
                    call.num_tokens = end - start
        if not plan.is_branch:
            return encoded.ids
        record.begin(plan.point.input_ids + encoded.ids)
        before = plan.point.sequence.record.messages[: plan.point.num_messages]
        record.messages = [*before, *plan.shown]
        return []

    def _check_length(self, plan: _Plan, num_observed: int) -> None:
        """Refuse a call that leaves no token for a completion.

        Raises:
            TooLongError: If so.
        """
        record = plan.sequence.record
        if num_observed < record.num_tokens_left:
            return
        budgets, nearest = record.budgets, record.nearest_limit
        if nearest is StopReason.RESPONSE_BUDGET:
            asked = record.num_response_tokens + num_observed
            raise TooLongError(asked, budgets.max_response_tokens, nearest)
        asked = len(record.input_ids) + num_observed
        raise TooLongError(asked, budgets.max_model_len, nearest)

    async def _generate(self, plan: _Plan, observed: list[int], call: ChatCall) -> Completion:
        record = plan.sequence.record
        left = record.num_tokens_left - len(observed)
        limit = min(left, record.budgets.max_turn_tokens or left, call.max_tokens or left)
        input_ids = record.input_ids + observed
        sampling = replace(
            record.sampling,
            max_new_tokens=limit,
            seed=self._draw_seed(input_ids),
            stop=(*record.sampling.stop, *call.stop),
        )
        async with self._turnstile:
            completion = await self._source.generate(
                input_ids, sampling, request_id=plan.sequence.engine_id
            )
        if completion.finish_reason is FinishReason.ABORT:
            raise EngineError("the engine aborted the call")
        if len(completion.token_ids) > limit:
            raise EngineError(
                f"the engine sampled {len(completion.token_ids)} tokens",
                expected=f"at most {limit}",
            )
        return completion

    def _draw_seed(self, input_ids: Sequence[int]) -> int:
        """Return the seed of a completion: a function of its input and of how often it was asked.

        So it does not depend on the order in which parallel calls arrive.
        """
        digest = blake2b(array("Q", input_ids).tobytes(), digest_size=16).digest()
        self._inputs[digest] += 1
        name = f"{digest.hex()}:{self._inputs[digest]}"
        return draw_seed(f"{self._request.seed}:{self._request.attempt}:{name}")

    def _append(
        self,
        plan: _Plan,
        observed: list[int],
        completion: Completion,
        call: ChatCall,
        started: float,
    ) -> tuple[ChatReply, Point]:
        """Append a completion to its sequence, and make the answer of the client."""
        record = plan.sequence.record
        if plan.delta is not None and not plan.is_branch:
            shown = record.append_observed(observed, role=plan.role)
            shown.num_cut_tokens = plan.num_cut
            shown.cut = "observation" if plan.num_cut else None
            record.messages += plan.shown
        turn = record.append_sampled(
            completion.token_ids,
            completion.log_probs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=time.monotonic() - started,
            seconds_started=unix_time(started),
        )
        if plan.sequence.cause == "side_call":
            record.exclude_turn(turn.index, f"a call of the model {call.model!r}")
        self._record_end(plan.sequence, turn, call)
        read = self._read(turn, completion, call, record)
        record.messages.append(read.message)
        point = Point(plan.sequence, turn, self._num_completions, len(record.messages))
        plan.sequence.points.append(point)
        self._num_completions += 1
        reply = self._reply(
            read, completion, call, num_input=len(record.input_ids) - turn.num_tokens
        )
        node = self._tree.add_completion(plan.after, reply.message, point)
        self._nodes[point] = self._replies[reply.reply_id] = node
        return reply, point

    def _record_end(self, sequence: TokenSequence, turn: Turn, call: ChatCall) -> None:
        record = sequence.record
        if sequence.cause != "side_call":
            self.cut = None
        if turn.finish_reason is not FinishReason.LENGTH:
            return
        if record.num_tokens_left > 0:
            turn.cut = "turn"
            is_own = call.max_tokens is not None and turn.num_tokens >= call.max_tokens
            self.counts["cut_max_tokens" if is_own else "cut_turn"] += 1
        else:
            is_response = record.nearest_limit is StopReason.RESPONSE_BUDGET
            turn.cut = "response" if is_response else "model"
            self._record_cut(record.nearest_limit, sequence)

    def _read(
        self, turn: Turn, completion: Completion, call: ChatCall, record: AsyncRolloutRequest
    ) -> CompletedTurn:
        """Read the tool calls of a completion, and record them."""
        context = self._context
        read = read_turn(
            completion.token_ids,
            context.template,
            context.parser,
            tools=[] if call.tool_choice == "none" else record.tool_schemas,
            check_arguments=context.settings.check_tool_arguments,
            num_calls_before=self._num_tool_calls,
            prompt_end=record.tokens_before(turn),
            taken_ids=self._call_ids.update(record.messages),
        )
        turn.calls = skip_calls(read.calls)
        for made, span in zip(turn.calls, read.call_spans, strict=True):
            made.span = span and (turn.start + span[0], turn.start + span[1])
        self._num_tool_calls += read.calls.num_calls
        if read.calls.malformed:
            self.counts["malformed_calls"] += len(read.calls.malformed)
            if context.settings.on_malformed_call == "mask":
                record.exclude_turn(turn.index, MALFORMED_CALL)
        return read

    def _reply(
        self, read: CompletedTurn, completion: Completion, call: ChatCall, *, num_input: int
    ) -> ChatReply:
        content, extra = read.message.text, read.message.model_extra or {}
        thought, text = split_thought(content)
        thought = next((str(extra[name]) for name in THOUGHT_FIELDS if extra.get(name)), thought)
        ends = {text.find(stop): stop for stop in call.stop if stop in text}
        stop = ends[min(ends)] if ends else None
        text = text[: min(ends)] if ends else text
        calls = tuple(SentCall.of(made) for made in read.message.tool_calls or [])
        unmet = self._find_unmet(call, calls)
        for name in unmet:
            metric = f"ignored_{name}"
            is_new = metric not in self.counts and len(self.counts) >= _MAX_COUNTS
            self.counts["ignored_other" if is_new else metric] += 1
        self.counts["completions"] += 1
        return ChatReply(
            reply_id=f"{self._request.request_id}-{next(_reply_numbers)}",
            message=SentMessage(
                role="assistant",
                text=text,
                form="text" if text else "null",
                thought=thought,
                calls=calls,
            ),
            finish_reason=completion.finish_reason,
            stop_sequence=stop,
            token_texts=[self._context.template.decode([id]) for id in completion.token_ids]
            if call.logprobs
            else [],
            log_probs=completion.log_probs if call.logprobs else [],
            prompt_tokens=num_input,
            completion_tokens=len(completion.token_ids),
            thought_tokens=self._count_thought(completion.token_ids, thought),
            cached_tokens=completion.cached_tokens,
            created=int(time.time()),
            unmet=unmet,
        )

    def _count_thought(self, ids: Sequence[int], thought: str) -> int:
        """Return the number of tokens up to the end of a completion's thought; 0 without one."""
        template = self._context.template
        text = template.decode(ids) if thought else ""
        end = text.find(thought) + len(thought)
        (span,) = template.token_spans.locate(ids, text, [(0, end) if thought else None])
        return span[1] if span else 0

    def _find_unmet(self, call: ChatCall, calls: Sequence[SentCall]) -> tuple[str, ...]:
        """Return the names of the client's options that had no effect on this completion."""
        own = self._request.sampling
        rules = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
        unmet = [name for name, value in call.sampling.items() if rules.get(name) != value]
        choice, names = call.tool_choice, {f"tool:{made.name}" for made in calls}
        if choice not in ("auto", "none") and not (
            calls if choice == "required" else names == {choice}
        ):
            unmet.append("tool_choice")
        if len(calls) > 1 and not call.parallel_calls:
            unmet.append("parallel_tool_calls")
        return (*unmet, *call.ignored)

    def finish(self) -> None:
        """Write the sequences to the request: the last one into its ledger, others as branches.

        The request stays running. Without a completion it has no tokens.
        """
        self.counts.update(
            exclude_unused(self._sequences, self._has_later, self._settings.discarded)
        )
        kept = [one for one in self._sequences if one.points]
        for sequence in kept:
            check_tokens(sequence, self._context)
        if kept:
            write_sequences(kept, self._request)
        self.counts["sequences"] = len(kept)
        for name, number in sorted((+self.counts).items()):
            self._request.metrics[f"gateway/{name}"] = float(number)

    def _has_later(self, point: Point) -> bool:
        """Whether the agent sampled again from the same history, after this completion."""
        node = self._nodes[point]
        siblings = node.parent.children if node.parent else []
        return any(one.sampled and one.sampled.order > point.order for one in siblings)


def _first_below(node: Node[Point]) -> Point | None:
    """Return the first completion below a node, if any."""
    waiting = [node]
    while waiting:
        current = waiting.pop(0)
        if current.sampled is not None:
            return current.sampled
        waiting += current.children
    return None
