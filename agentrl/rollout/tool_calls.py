"""Read a completion, check its tool calls, execute them, and make the messages that answer them.

    sampled tokens -> text -> parsed calls -> checked calls -> outcomes -> one message per call

Calls are checked against the JSON Schemas of the tools. Valid calls are executed in parallel. Every
call, valid or malformed, is answered by one message, in the order of the calls.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachetools import LRUCache

from agentrl.errors import TemplateError, ToolCallError
from agentrl.messages import (
    CallOutcome,
    ContentPart,
    Message,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agentrl.rollout.argument_schemas import find_argument_error
from agentrl.rollout.fitting import FittedText
from agentrl.rollout.records import CallRecord, unix_time
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.assistant_turn import find_frames
from agentrl.rollout.tool_parsers import MalformedCall, ParsedCall, ParsedTurn, ToolParser
from agentrl.rollout.tool_parsers.base import Span
from agentrl.tools.runtime.instance import ToolOutcome
from agentrl.tools.runtime.session import ToolSession

UNREAD_NAME = "unknown"
"""Name of the tool in the answer to a call of which no name can be read."""


class CheckedCalls(NamedTuple):
    """The calls of a turn: those to execute, and the malformed ones."""

    calls: Sequence[ParsedCall] = ()
    malformed: Sequence[MalformedCall] = ()

    @property
    def num_calls(self) -> int:
        """Number of calls, malformed ones included."""
        return len(self.calls) + len(self.malformed)

    @property
    def in_order(self) -> list[ParsedCall | MalformedCall]:
        """All calls, in the order of the turn."""
        return sorted([*self.calls, *self.malformed], key=lambda call: call.index)


class CompletedTurn(NamedTuple):
    """The content of a completion."""

    text: str
    """The whole text, stop token included."""
    message: Message
    """The assistant message, to be appended to the conversation."""
    calls: CheckedCalls
    call_spans: list[Span | None]
    """Tokens of each call within the turn, malformed calls included; None: not located."""


def read_turn(
    ids: Sequence[int],
    template: ChatTemplate,
    parser: ToolParser,
    *,
    tools: Sequence[OpenAIFunctionToolSchema],
    check_arguments: bool = True,
    num_calls_before: int = 0,
    prompt_end: Sequence[int] | None = None,
    taken_ids: Collection[str] = (),
) -> CompletedTurn:
    """Read a completion. The ledger keeps its tokens unchanged (train what was sampled).

    Args:
        ids: The sampled tokens.
        template: Decodes the tokens and knows the stop tokens.
        parser: Finds the calls in the text.
        tools: Tools of the request; without tools, nothing is parsed as a call.
        check_arguments: See `check_calls`.
        num_calls_before: Number of earlier calls in the conversation; numbering continues from it.
        prompt_end: The last tokens before the completion, which may open a thought; None: those of
            the template's generation prompt.
        taken_ids: Ids of earlier calls. Those of new calls differ from them.
    """
    stop = template.stop_texts.get(ids[-1], "") if ids else ""
    content_ids = ids[:-1] if stop else ids
    text = template.decode(content_ids)
    frames = template.learn_once("frames", parser, lambda: find_frames(template, parser))
    reader = template.learn_once("reader", parser, lambda: parser.with_thoughts(frames.thoughts))
    is_thinking = template.is_in_thought(prompt_end, frames.thoughts)
    parsed = ParsedTurn(text)
    if tools:
        whole = text + stop if stop in reader.closers else text
        parsed = reader.parse(whole, starts_in_thought=is_thinking, tools=tools)
        parsed = parsed.numbered(num_calls_before, taken_ids, reader.id_form)
    checked = check_calls(parsed, tools, check_arguments=check_arguments)
    calls = [call.tool_call for call in parsed.calls]
    framed = frames.read(parsed.content, num_calls=len(calls), starts_in_thought=is_thinking)
    message = Message(role="assistant", content=framed.content, tool_calls=calls or None)
    if framed.fields:
        message = message.model_copy(update=framed.fields)
    text_spans = [call.span for call in checked.in_order]
    return CompletedTurn(
        text=text + stop,
        message=message,
        calls=checked,
        call_spans=template.token_spans.locate(content_ids, text, text_spans),
    )


class CallIds:
    """The ids of the calls of a conversation. Each message is read once."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._read: dict[int, tuple[Sequence[Message], int]] = {}

    def update(self, messages: Sequence[Message]) -> set[str]:
        """Add the ids in a list that only grows; return them and those of all earlier lists."""
        _, start = self._read.get(id(messages), (messages, 0))
        for message in messages[start:]:
            self._ids.update(call.id for call in message.tool_calls or () if call.id)
        self._read[id(messages)] = messages, len(messages)
        return self._ids


def check_calls(
    parsed: ParsedTurn,
    tools: Iterable[OpenAIFunctionToolSchema],
    *,
    check_arguments: bool = True,
) -> CheckedCalls:
    """Check the calls of a turn against the names and JSON Schemas of the tools.

    Args:
        parsed: The turn, as the parser read it.
        tools: Tools of the request.
        check_arguments: Whether arguments that do not match the schema make a call malformed
            (`rollout.multi_turn.check_tool_arguments`); if not, the tool gets them.

    Returns:
        The calls to execute, and the malformed ones: unparsable, of an unknown tool, or with
        arguments that do not match the schema.
    """
    schemas = {tool.name: tool.function.parameters if check_arguments else {} for tool in tools}
    calls: list[ParsedCall] = []
    malformed = list(parsed.malformed)
    for call in parsed.calls:
        if call.name not in schemas:
            known = ", ".join(schemas) or "none"
            reason = f"there is no tool {call.name[:80]!r}; the tools are: {known}"
        else:
            reason = find_argument_error(call.arguments, schemas[call.name])
        if reason is None:
            calls.append(call)
        else:
            text = f"{call.name}({call.arguments})"
            refused = MalformedCall(
                text, reason, call.name, call.index, call.span, call.arguments, call.given_id, True
            )
            malformed.append(refused)
    return CheckedCalls(calls, sorted(malformed, key=lambda call: call.index))


class ShownText(NamedTuple):
    """The text of a tool as a message, cut to its budget."""

    message: Message
    num_cut: int
    """Tokens that the text lost to its budget."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one call."""

    message: Message
    """The message to append: the result, or the reason why the call is malformed."""
    response: ToolResponse
    """The response of the tool, images and videos included."""
    record: CallRecord
    """Record of the call. The runner sets its `num_tokens`."""
    should_stop: bool = False
    """Whether the tool ends the request."""
    is_infrastructure_failure: bool = False
    """Whether the tool failed (crash, time-out, unavailable), so the model is not at fault."""


class ToolCaller:
    """Execute and answer the calls of a turn, for every request of a run.

    Args:
        parser: Formats results, and determines their role.
        fit: Cuts a text to the budget of one observation.
    """

    def __init__(self, parser: ToolParser, fit: Callable[[str], FittedText]) -> None:
        self._parser = parser
        self._fit = fit
        self._answerable: LRUCache[Any, Sequence[OpenAIFunctionToolSchema]] = LRUCache(1024)
        self._unread_name: str | None = None
        """Name of the tool in an answer to a call without one, if the template writes names."""

    async def answer(self, checked: CheckedCalls, session: ToolSession) -> list[Observation]:
        """Answer every call of a turn, in the order of the calls.

        Args:
            checked: The calls of the turn.
            session: The tools of the request. Cancellation cancels the running calls.
        """
        outcomes = await session.execute([call.tool_call for call in checked.calls])
        answers = {
            call.index: self._observe(outcome)
            for call, outcome in zip(checked.calls, outcomes, strict=True)
        }
        for call in checked.malformed:
            response = ToolResponse(text=describe_malformed(call))
            record = _record_unexecuted(call)
            shown = self.show(response, tool=record.name or None, call_id=record.call_id)
            record.num_cut_tokens = shown.num_cut
            answers[call.index] = Observation(shown.message, response, record)
        return [answers[index] for index in sorted(answers)]

    def check_answerable(
        self,
        checked: CheckedCalls,
        template: ChatTemplate,
        tools: Sequence[OpenAIFunctionToolSchema],
    ) -> None:
        """Check that the template can show the answers to the calls of a turn.

        Raises:
            TemplateError: If it cannot, such as those of two tools in one turn.
        """
        calls = checked.in_order
        names = tuple((call.name, call.id) for call in calls)
        key = (template, tuple(map(id, tools)), names)
        if key not in self._answerable:
            try:
                self._outline(calls, template, tools)
            except TemplateError:
                if self._unread_name or all(call.name for call in calls):
                    raise
                self._unread_name = UNREAD_NAME
                self._outline(calls, template, tools)
            # The value refers to the tools, so that no later tool has an `id` of the key.
            self._answerable[key] = tuple(tools)

    def _outline(
        self,
        calls: Sequence[ParsedCall | MalformedCall],
        template: ChatTemplate,
        tools: Sequence[OpenAIFunctionToolSchema],
    ) -> None:
        outline = [self._message("?", call.name or None, call.id) for call in calls]
        template.plan_delta(outline, tools=tools)

    def show(
        self, response: ToolResponse, *, tool: str | None, call_id: str | None = None
    ) -> ShownText:
        """Format the response of a tool as a message, and cut its text to its budget.

        Images and videos become parts of their own, before the text.
        """
        fitted = self._fit(response.wording)
        content = response.content(self._parser.render_result(fitted.text))
        return ShownText(self._message(content, tool, call_id), fitted.num_cut)

    def _message(
        self, content: str | list[ContentPart], tool: str | None, call_id: str | None
    ) -> Message:
        role = self._parser.result_role
        if role != "tool":
            return Message(role=role, content=content)
        name = tool or self._unread_name
        return Message(role=role, content=content, tool_call_id=call_id, name=name)

    def _observe(self, outcome: ToolOutcome) -> Observation:
        call, response = outcome.call, outcome.response
        shown = self.show(response, tool=call.function.name, call_id=call.id)
        record = CallRecord(
            call_id=call.id,
            name=call.function.name,
            arguments=call.function.arguments,
            outcome=outcome.outcome,
            message=outcome.message,
            traceback=outcome.traceback,
            seconds=outcome.seconds,
            queue_seconds=outcome.queue_seconds,
            seconds_started=None if outcome.arrived is None else unix_time(outcome.arrived),
            num_attempts=outcome.num_attempts,
            is_cached=outcome.is_cached,
            reward=outcome.reward,
            num_cut_tokens=shown.num_cut,
            metrics=outcome.metrics,
        )
        return Observation(
            message=shown.message,
            response=response,
            record=record,
            should_stop=outcome.should_stop,
            is_infrastructure_failure=outcome.is_infrastructure_failure,
        )


def describe_malformed(call: MalformedCall) -> str:
    """Return the text that shows the model what is wrong with a call."""
    what = f"the call of {call.name!r}" if call.name else "the tool call"
    return f"Error: {what} was not executed: {call.reason}"


def skip_calls(checked: CheckedCalls) -> list[CallRecord]:
    """Record the calls of the last turn of a request. They are not executed."""
    return [_record_unexecuted(call) for call in checked.in_order]


def _record_unexecuted(call: ParsedCall | MalformedCall) -> CallRecord:
    is_malformed = isinstance(call, MalformedCall)
    return CallRecord(
        call_id=call.id,
        name=call.name,
        arguments=call.arguments,
        outcome=CallOutcome.MALFORMED if is_malformed else CallOutcome.SKIPPED,
        message=call.reason if is_malformed else "",
        num_attempts=0,
    )


def raise_tool_failure(found: Iterable[Observation]) -> None:
    """Fail the request if a tool failed in one of its calls (`on_tool_failure: fail`).

    Raises:
        ToolCallError: For the first call in which the tool failed.
    """
    for observation in found:
        if observation.is_infrastructure_failure:
            call = observation.record
            why = f"tool {call.name!r}, {call.outcome}: {call.message}"
            raise ToolCallError(why, tool=call.name, call=call.call_id)
