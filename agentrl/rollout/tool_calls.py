"""From the calls of a turn to the messages that answer them.

The calls that a parser read are checked against the tools' JSON Schemas; those that stand the check
are executed in parallel, and every call, malformed or not, is answered by one message, in the order
of the calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.errors import ToolCallError
from agentrl.messages import (
    CallOutcome,
    ContentPart,
    Message,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from agentrl.rollout.argument_schemas import objection_to
from agentrl.rollout.fitting import FittedText
from agentrl.rollout.records import CallRecord
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.assistant_turn import find_frames
from agentrl.rollout.tool_parsers import MalformedCall, ParsedCall, ParsedTurn, ToolParser
from agentrl.rollout.tool_parsers.base import Span
from agentrl.tools.runtime.instance import ToolOutcome
from agentrl.tools.runtime.session import ToolSession


class CheckedCalls(NamedTuple):
    """The calls of a turn, sorted into those to execute and those to complain about."""

    calls: Sequence[ParsedCall] = ()
    malformed: Sequence[MalformedCall] = ()

    @property
    def num_calls(self) -> int:
        """Calls of the turn, malformed ones included."""
        return len(self.calls) + len(self.malformed)

    @property
    def spans(self) -> list[Span | None]:
        """Where each call stands in the turn's text, in their order."""
        calls = sorted([*self.calls, *self.malformed], key=lambda call: call.index)
        return [call.span for call in calls]


class ShownText(NamedTuple):
    """What a tool said, worded and within its budget."""

    message: Message
    num_cut: int
    """Tokens that the text lost to its budget."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one call."""

    message: Message
    """To be appended: the result, or what is wrong with the call."""
    response: ToolResponse
    """What the tool gave, images and videos included."""
    record: CallRecord
    """For the turn's record; the tokens are filled in by whoever encodes the message."""
    should_stop: bool = False
    """The tool ends the request."""
    is_infrastructure_failure: bool = False
    """The tool crashed, hung or was down: the call says nothing of the model."""


class ToolCaller:
    """Check, execute and answer the calls of a turn, for every request of a run.

    Args:
        parser: Says how results are worded, and in which role they come.
        fit: Cuts a text to the budget of one observation.
    """

    def __init__(self, parser: ToolParser, fit: Callable[[str], FittedText]) -> None:
        self._parser = parser
        self._fit = fit

    async def answer(self, checked: CheckedCalls, session: ToolSession) -> list[Observation]:
        """Answer every call of a turn, in the order of the calls.

        Args:
            checked: The calls of the turn.
            session: The request's tools. Cancelling this call cancels what they execute.
        """
        outcomes = await session.execute([call.tool_call for call in checked.calls])
        answered = {
            call.index: self._observe(outcome)
            for call, outcome in zip(checked.calls, outcomes, strict=True)
        }
        answered |= {call.index: self._complain(call) for call in checked.malformed}
        return [answered[index] for index in sorted(answered)]

    def outline(self, checked: CheckedCalls) -> list[Message]:
        """Make a message for each call that has the shape of its answer, in order of the calls."""
        calls = sorted([*checked.calls, *checked.malformed], key=lambda call: call.index)
        return [self._message("?", call.name or None, call.id) for call in calls]

    def show(
        self, response: ToolResponse, *, tool: str | None, call_id: str | None = None
    ) -> ShownText:
        """Word what a tool said (or what is said of it) as a message, its text cut to its budget.

        Images and videos stand in it as parts of their own, before the text.
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
        return Message(role=role, content=content, tool_call_id=call_id, name=tool)

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

    def _complain(self, call: MalformedCall) -> Observation:
        response = ToolResponse(text=describe_malformed(call))
        record = _record_of(call, CallOutcome.MALFORMED)
        shown = self.show(response, tool=record.name or None, call_id=record.call_id)
        record.num_cut_tokens = shown.num_cut
        return Observation(shown.message, response, record)


def check_calls(
    parsed: ParsedTurn,
    tools: Iterable[OpenAIFunctionToolSchema],
    *,
    check_arguments: bool = True,
) -> CheckedCalls:
    """Check the calls of a turn against the tools' names and JSON Schemas.

    Args:
        parsed: What the parser read.
        tools: Of the request.
        check_arguments: Whether arguments that the schema refuses make a call malformed
            (`rollout.multi_turn.check_tool_arguments`); if not, they reach the tool.

    Returns:
        The calls that may be executed; those that were malformed before, and those that are found
        to be now: an unknown tool, arguments that the schema refuses.
    """
    schemas = {tool.name: tool.function.parameters if check_arguments else {} for tool in tools}
    calls: list[ParsedCall] = []
    malformed = list(parsed.malformed)
    for call in parsed.calls:
        reason = _objection(call, schemas)
        if reason is None:
            calls.append(call)
        else:
            malformed.append(_refused(call, reason))
    return CheckedCalls(calls, sorted(malformed, key=lambda call: call.index))


def skip_calls(checked: CheckedCalls) -> list[CallRecord]:
    """Record the calls of a turn behind which the request ends: none is executed."""
    by_index = {call.index: _record_of(call, CallOutcome.SKIPPED) for call in checked.calls}
    by_index |= {call.index: _record_of(call, CallOutcome.MALFORMED) for call in checked.malformed}
    return [by_index[index] for index in sorted(by_index)]


def raise_tool_failure(found: Iterable[Observation]) -> None:
    """End a request for the first of its calls that the tool, and not the model, failed.

    Raises:
        ToolCallError: where there is one.
    """
    for observation in found:
        if observation.is_infrastructure_failure:
            call = observation.record
            why = f"tool {call.name!r}, {call.outcome}: {call.message}"
            raise ToolCallError(why, tool=call.name, call=call.call_id)


def describe_malformed(call: MalformedCall) -> str:
    """Say to the model what is wrong with a call."""
    what = f"the call of {call.name!r}" if call.name else "the tool call"
    return f"Error: {what} was not executed: {call.reason}"


def _objection(call: ParsedCall, schemas: Mapping[str, dict[str, Any]]) -> str | None:
    """Say why a call cannot be executed; None where it can."""
    if call.name not in schemas:
        known = ", ".join(schemas) or "none"
        return f"there is no tool {call.name[:80]!r}; the tools are: {known}"
    return objection_to(call.arguments, schemas[call.name])


def _refused(call: ParsedCall, reason: str) -> MalformedCall:
    text = f"{call.name}({call.arguments})"
    return MalformedCall(
        text, reason, call.name, call.index, call.span, call.arguments, call.given_id, True
    )


def _record_of(call: ParsedCall | MalformedCall, outcome: CallOutcome) -> CallRecord:
    return CallRecord(
        call_id=call.id,
        name=call.name,
        arguments=call.arguments,
        outcome=outcome,
        message=call.reason if isinstance(call, MalformedCall) else "",
        num_attempts=0,
    )


class ReadTurn(NamedTuple):
    """What a completion says."""

    text: str
    """All of it, its stop token too."""
    message: Message
    """To be appended to the conversation."""
    calls: CheckedCalls
    call_spans: list[Span | None]
    """Of each call, malformed ones included: its tokens in the turn; None: not located."""


def read_turn(
    ids: Sequence[int],
    template: ChatTemplate,
    parser: ToolParser,
    *,
    tools: Sequence[OpenAIFunctionToolSchema],
    check_arguments: bool = True,
    num_calls_before: int = 0,
) -> ReadTurn:
    """Read a completion. Its tokens stay what they are, whatever is read in them (train what was
    sampled).

    Args:
        ids: What was sampled.
        template: Decodes, and knows its stop tokens.
        parser: Finds calls in the text.
        tools: Of the request; where there are none, nothing is a call.
        check_arguments: See `check_calls`.
        num_calls_before: Calls of the conversation so far, after which those of this turn count.
    """
    stop = template.stop_texts.get(ids[-1], "") if ids else ""
    said = ids[:-1] if stop else ids
    text = template.decode(said)
    parsed = ParsedTurn(text)
    if tools:
        in_thought = template.starts_in_thought
        parsed = parser.parse(text, starts_in_thought=in_thought, tools=tools)
        parsed = parsed.numbered(num_calls_before)
    checked = check_calls(parsed, tools, check_arguments=check_arguments)
    calls = [call.tool_call for call in parsed.calls]
    frames = template.learn_once("frames", parser, lambda: find_frames(template, parser))
    framed = frames.read(parsed.content, num_calls=len(calls))
    message = Message(role="assistant", content=framed.content, tool_calls=calls or None)
    if framed.fields:
        message = message.model_copy(update=framed.fields)
    return ReadTurn(
        text=text + stop,
        message=message,
        calls=checked,
        call_spans=template.token_spans.locate(said, text, checked.spans),
    )
