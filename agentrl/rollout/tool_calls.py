"""From the calls of a turn to the messages that answer them.

The calls that a parser read are checked against the tools' JSON Schemas; those that stand the check
are executed in parallel, and every call, malformed or not, is answered by one message, in the order
of the calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jsonschema
from jsonschema.exceptions import best_match
from referencing import Registry

from agentrl.messages import FunctionCall, Message, OpenAIFunctionToolSchema, ToolCall, ToolResponse
from agentrl.rollout.request import CallRecord
from agentrl.rollout.tool_parsers import MalformedCall, ParsedCall, ParsedTurn, ToolParser
from agentrl.tools.instance import ToolOutcome
from agentrl.tools.life import ToolSession

Side = Literal["left", "middle", "right"]

_LONGEST_REASON = 500


class CheckedCalls(NamedTuple):
    """The calls of a turn, sorted into those to execute and those to complain about."""

    calls: list[ParsedCall]
    malformed: list[MalformedCall]


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


class ToolCaller:
    """Check, execute and answer the calls of a turn, for every request of a run.

    Args:
        parser: Says how results are worded, and in which role they come.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    async def answer(
        self, parsed: ParsedTurn, tools: Sequence[OpenAIFunctionToolSchema], session: ToolSession
    ) -> list[Observation]:
        """Answer every call of a turn, in the order of the calls.

        Args:
            parsed: The turn.
            tools: What the request's model was told of.
            session: The request's tools. Cancelling this call cancels what they execute.
        """
        checked = check_calls(parsed, tools)
        outcomes = await session.execute([as_tool_call(call) for call in checked.calls])
        answered = {
            call.index: self._observe(outcome)
            for call, outcome in zip(checked.calls, outcomes, strict=True)
        }
        answered |= {call.index: self._complain(call) for call in checked.malformed}
        return [answered[index] for index in sorted(answered)]

    def skipped(self, parsed: ParsedTurn) -> list[CallRecord]:
        """Record the calls of a turn behind which the request ends: none is executed."""
        by_index = {call.index: _record_of(call, "skipped") for call in parsed.calls}
        by_index |= {call.index: _record_of(call, "malformed") for call in parsed.malformed}
        return [by_index[index] for index in sorted(by_index)]

    def _observe(self, outcome: ToolOutcome) -> Observation:
        call = outcome.call
        record = CallRecord(
            call_id=call.id,
            name=call.function.name,
            arguments=call.function.arguments,
            outcome=outcome.outcome.value,
            message=outcome.message,
            seconds=outcome.seconds,
            reward=outcome.reward,
            metrics=outcome.metrics,
        )
        message = self._message(outcome.response.text or "", call.id, call.function.name)
        return Observation(message, outcome.response, record, outcome.should_stop)

    def _complain(self, call: MalformedCall) -> Observation:
        text = describe_malformed(call)
        message = self._message(text, call.id, call.name or None)
        return Observation(message, ToolResponse(text=text), _record_of(call, "malformed"))

    def _message(self, text: str, call_id: str, name: str | None) -> Message:
        content = self._parser.render_result(as_unicode(text))
        role = self._parser.result_role
        if role != "tool":
            return Message(role=role, content=content)
        return Message(role=role, content=content, tool_call_id=call_id, name=name)


def check_calls(parsed: ParsedTurn, tools: Iterable[OpenAIFunctionToolSchema]) -> CheckedCalls:
    """Hold the calls of a turn against the tools' names and JSON Schemas.

    Returns:
        The calls that may be executed; those that were malformed before, and those that are found
        to be now: an unknown tool, arguments that the schema refuses.
    """
    schemas = {tool.name: tool.function.parameters for tool in tools}
    calls: list[ParsedCall] = []
    malformed = list(parsed.malformed)
    for call in parsed.calls:
        reason = _objection(call, schemas)
        if reason is None:
            calls.append(call)
        else:
            text = f"{call.name}({call.arguments})"
            malformed.append(MalformedCall(text, reason, call.name, call.index))
    return CheckedCalls(calls, sorted(malformed, key=lambda call: call.index))


def as_tool_call(call: ParsedCall) -> ToolCall:
    """Write a parsed call as it stands in an assistant message."""
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def describe_malformed(call: MalformedCall) -> str:
    """Say to the model what is wrong with a call."""
    what = f"the call of {call.name!r}" if call.name else "the tool call"
    return f"Error: {what} was not executed: {call.reason}"


def as_unicode(text: str) -> str:
    """Replace what no tokenizer can encode (lone surrogates)."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Cut(NamedTuple):
    """Tokens of an observation within their budget."""

    ids: list[int]
    num_cut: int
    """Tokens of the observation that are gone."""


def cut_observation(
    ids: Sequence[int], max_tokens: int, side: Side = "middle", *, marker_ids: Sequence[int] = ()
) -> Cut:
    """Cut an observation to its budget, in tokens.

    Args:
        ids: Token ids of the observation's text.
        max_tokens: The budget; the marker counts. A marker that leaves no room is left out.
        side: Which end is kept, as verl names it: `left` keeps the beginning, `right` the end,
            `middle` cuts the middle out and keeps both ends.
        marker_ids: Token ids that stand where something was cut.

    Example:
        >>> cut_observation([1, 2, 3, 4, 5, 6], 5, "middle", marker_ids=[0])
        Cut(ids=[1, 2, 0, 5, 6], num_cut=2)
    """
    ids = list(ids)
    if len(ids) <= max_tokens:
        return Cut(ids, 0)
    marker = list(marker_ids) if len(marker_ids) < max_tokens else []
    kept = max_tokens - len(marker)
    head = {"left": kept, "middle": (kept + 1) // 2, "right": 0}[side]
    tail = kept - head
    return Cut(ids[:head] + marker + ids[len(ids) - tail :], len(ids) - kept)


def clip_text(text: str, max_characters: int, side: Side = "middle") -> str:
    """Clip a text before it is encoded, so that a megabyte costs no megabyte of tokens.

    Choose `max_characters` so that what is left is still more than the token budget, and
    `cut_observation` cuts the rest.
    """
    if len(text) <= max_characters:
        return text
    head = {"left": max_characters, "middle": max_characters // 2, "right": 0}[side]
    tail = max_characters - head
    return text[:head] + text[len(text) - tail :]


def _objection(call: ParsedCall, schemas: Mapping[str, dict[str, Any]]) -> str | None:
    """Say why a call cannot be executed; None where it can."""
    if call.name not in schemas:
        known = ", ".join(schemas) or "none"
        return f"there is no tool {call.name[:80]!r}; the tools are: {known}"
    # An empty registry: a `$ref` to somewhere on the network is never followed.
    validator = jsonschema.Draft202012Validator(schemas[call.name], registry=Registry())
    try:
        error = best_match(validator.iter_errors(call.arguments))
    except Exception as broken:  # noqa: BLE001 - a schema that cannot be applied to these arguments
        return f"its arguments cannot be checked: {type(broken).__name__}: {broken}"
    if error is None:
        return None
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"arguments{place}: {error.message[:_LONGEST_REASON]}"


def _record_of(
    call: ParsedCall | MalformedCall, outcome: Literal["skipped", "malformed"]
) -> CallRecord:
    if isinstance(call, MalformedCall):
        return CallRecord(call_id=call.id, name=call.name, outcome=outcome, message=call.reason)
    return CallRecord(call_id=call.id, name=call.name, arguments=call.arguments, outcome=outcome)
