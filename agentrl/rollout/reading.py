"""From the tokens of a turn to what they say: a message, and the calls in it."""

from collections.abc import Sequence
from typing import NamedTuple

from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.assistant_turn import find_frames
from agentrl.rollout.tool_calls import CheckedCalls, check_calls
from agentrl.rollout.tool_parsers import ParsedTurn, ToolParser
from agentrl.rollout.tool_parsers.base import Span


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
