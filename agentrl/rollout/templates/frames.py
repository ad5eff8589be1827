"""What a template writes round the texts of an assistant turn, and the turn without it.

A message's content is what the policy says. What only frames it in the tokens (a channel's name,
`<|END_RESPONSE|>`, the wrapper of tool calls) is written by the template again when the message is
rendered. Frames are found by rendering; nothing here knows a model's name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from agentrl.errors import TemplateError
from agentrl.rollout.templates.structure import THOUGHTS, Anatomy
from agentrl.rollout.templates.conversation import encode_turn, up_to_end
from agentrl.rollout.templates.delta import NEIGHBOUR
from agentrl.rollout.templates.slots import Hole, Voice
from agentrl.rollout.templates.cutting import common_length, cut, places_in_order
from agentrl.rollout.templates.probe_conversations import calling, result, tool_schema

if TYPE_CHECKING:
    from agentrl.rollout.templates.template import ChatTemplate
    from agentrl.rollout.tool_parsers import ToolParser

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which templates take a thought apart from the answer."""


class Framed(NamedTuple):
    """What a turn says."""

    content: str
    fields: Mapping[str, str]
    """A thought that the template takes in a field of its own, by the field's name."""


@dataclass(frozen=True, slots=True)
class TurnFrames:
    """What a template writes round the texts of an assistant turn; empty where it writes nothing.

    Frames that the template itself reads in a content (`<think>` in many) are not among them.
    """

    opening: str = ""
    """The end of the generation prompt that opens a thought."""
    before: str = ""
    """Before an answer."""
    after: str = ""
    """After an answer or a thought and an answer, without the turn's end."""
    field: str = ""
    """Name of the field of a thought; empty: thoughts are left in the content."""
    thought: str = ""
    """Before a thought."""
    between: str = ""
    """Between a thought and its answer."""
    calls: re.Pattern[str] | None = None
    """Matches what is left of the wrapper of calls when these are taken out."""

    def read(self, text: str, *, num_calls: int) -> Framed:
        """Return what a turn says.

        Args:
            text: The turn without its calls and its stop token.
            num_calls: How many calls were taken out.
        """
        if num_calls and self.calls:
            text = self.calls.sub("", text).strip()
        text = text.removesuffix(self.after)
        if self.field and text.startswith(self.thought) and self.between in text:
            thought, _, answer = text.removeprefix(self.thought).partition(self.between)
            return Framed(answer, {self.field: thought})
        if self.before:
            text = text.removeprefix(self.before)
        return Framed(self.opening + text if text else "", {})


def find_frames(template: "ChatTemplate", parser: "ToolParser") -> TurnFrames:
    """Find a template's frames.

    Args:
        template: The run's template.
        parser: Takes the calls out of a turn.
    """
    anatomy = template.anatomy
    opening = _find_opening(anatomy)
    calls = _find_wrapper(template, parser)
    try:
        before, after = _find_answer(template)
        field, thought, between = _find_thought(template, after)
    except TemplateError:
        return TurnFrames(opening, calls=calls)
    return TurnFrames(opening, before, after, field, thought, between, calls)


def _find_opening(anatomy: Anatomy) -> str:
    try:
        prompt = anatomy.generation_prompt
    except TemplateError:
        return ""
    found = ((prompt.rfind(start), prompt.rfind(end)) for start, end in THOUGHTS.items())
    starts = [start for start, end in found if start > end]
    return prompt[max(starts) :] if starts else ""


def _find_answer(template: "ChatTemplate") -> tuple[str, str]:
    """Return what is before and after an answer, if the template does not read it in a content."""
    [before, after] = _literals(template, {"content": _hole(1)}, [1])
    own = _render(template.anatomy, content=f"{before}Yes.{after}")
    is_read = own == _render(template.anatomy, content="Yes.")
    return ("", "") if is_read else (before, after)


def _find_thought(template: "ChatTemplate", after: str) -> tuple[str, str, str]:
    """Return the field of a thought and what frames it, if the template needs the field."""
    for field in THOUGHT_FIELDS:
        try:
            found = _literals(template, {"content": _hole(1), field: _hole(2)}, [2, 1])
            rendered = _render(template.anatomy, content="Yes.", **{field: "Hm."})
        except TemplateError:
            continue
        if len(found) == 3 and found[1].strip():
            inside = _render(template.anatomy, content=f"{found[0]}Hm.{found[1]}Yes.{after}")
            return ("", "", "") if inside == rendered else (field, found[0], found[1])
    return "", "", ""


def _literals(template: "ChatTemplate", message: dict[str, Hole], order: list[int]) -> list[str]:
    """Return the literals of an assistant turn after the generation prompt, without its end.

    Raises:
        TemplateError: if its texts are not in this order.
    """
    anatomy, asked = template.anatomy, _hole(0)
    holes = [asked, *message.values()]
    question = {"role": "user", "content": asked}
    opened = str(cut(anatomy.render_behind_preface([question], True), [asked])[-1])
    nodes = [question, {"role": "assistant", **message}]
    pieces = cut(anatomy.render_behind_preface(nodes, False), holes)
    if places_in_order(pieces) != [NEIGHBOUR, *(NEIGHBOUR + number for number in order)]:
        raise TemplateError("the template writes the texts of a turn in another order")
    lead, *rest = (str(piece) for piece in pieces[2::2])
    if not lead.startswith(opened):
        raise TemplateError("the template opens an older turn otherwise")
    start = common_length(lead, opened, anatomy.encoder.control_pattern)
    end = up_to_end(anatomy, rest[-1])
    stop = next((s for s in template.stop_texts.values() if s and end.endswith(s)), "")
    return [lead[start:], *rest[:-1], end.removesuffix(stop)]


def _render(anatomy: Anatomy, **message: str) -> str | None:
    nodes = [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}]
    try:
        return anatomy.render_behind_preface(nodes, False)({})
    except TemplateError:
        return None


def _find_wrapper(template: "ChatTemplate", parser: "ToolParser") -> re.Pattern[str] | None:
    """Make the pattern of what is left of a call's wrapper when the call is taken out."""
    if template.anatomy.call_style is None:
        return None
    try:
        ids = encode_turn(template, calling("Oslo"), [result()], [tool_schema()])
    except TemplateError:
        return None
    text = template.decode(ids[:-1] if ids[-1] in template.stop_token_ids else ids)
    parsed = parser.parse(text, tools=[tool_schema()])
    spans = [call.span for call in parsed.calls]
    if len(spans) != 1 or spans[0] is None or not parsed.content.strip():
        return None
    before, after = text[: spans[0][0]].strip(), text[spans[0][1] :].strip()
    if not before or not after:
        return None  # a thought, say
    return re.compile(re.escape(before) + r"\s*" + re.escape(after))


def _hole(number: int) -> Hole:
    return Hole(NEIGHBOUR + number, -1, Voice.POLICY, is_content=False)
