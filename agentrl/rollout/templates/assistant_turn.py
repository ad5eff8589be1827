"""Assistant turns: the tokens of a message, and the content of a sampled turn.

A demonstration's prompt, deltas and generation prompts are those of a rollout, so a policy that is
trained on it sees the same tokens in a rollout. An assistant turn is what the template writes for
it after the generation prompt, with the token that ends it.

A message's content is what the policy says. The rest of the turn's text (a channel's name,
`<|END_RESPONSE|>`, the wrapper of tool calls) is a frame, which the template writes again when the
message is rendered. Frames are found by rendering; nothing here knows a model's name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.errors import TemplateError
from agentrl.media.positions import place_runs
from agentrl.media.records import MediaSpan
from agentrl.messages import THOUGHTS, USUAL_THOUGHTS, Message, opens_thought
from agentrl.rollout.templates.compiled import CompiledTemplate
from agentrl.rollout.templates.cutting import (
    Piece,
    SlotUse,
    common_length,
    cut,
    learn,
    slots_in_order,
)
from agentrl.rollout.templates.probe_conversations import call_message, result_message, tool_schema
from agentrl.rollout.templates.slots import (
    CONTEXT_SLOT,
    ShapedConversation,
    Slot,
    TextOrigin,
    context_slot,
)
from agentrl.rollout.templates.structure import REASONING_FIELDS, TemplateStructure
from agentrl.rollout.templates.template import ChatTemplate, Tools
from agentrl.rollout.tool_parsers import ToolParser


class EncodedConversation(NamedTuple):
    """A demonstration's tokens."""

    ids: list[int]
    loss_mask: list[int]
    """1 on the text of assistant turns and on the token that ends each, else 0."""
    spans: list[MediaSpan]
    """The runs of placeholder tokens of images and videos."""


def encode_conversation(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = ()
) -> EncodedConversation:
    """Encode a demonstration for supervised training, with the mask of a rollout.

    Messages after the last assistant turn are left out.

    Raises:
        TemplateError: if the template cannot carry the demonstration, if it holds no assistant
            turn, or if no message precedes the first one.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise TemplateError("the demonstration has no assistant turn", template=template.name)
    if turns[0] == 0:
        raise TemplateError(
            "the demonstration starts with an assistant turn",
            template=template.name,
            role="assistant",
            expected="a system or user message before it",
        )
    ids, runs = template.encode_prompt_media(messages[: turns[0]], tools)
    mask, spans = [0] * len(ids), place_runs([], runs)
    for start, stop in zip(turns, [*turns[1:], None], strict=True):
        replies = [] if stop is None else messages[start + 1 : stop]
        turn = encode_turn(template, messages[start], replies, tools)
        ids += turn
        mask += [1] * len(turn)
        if stop is not None:
            delta = template.encode_delta(replies, last_ids=turn, tools=tools)
            spans += place_runs(spans, delta.runs, shift=len(ids))
            ids += delta.ids
            mask += [0] * len(delta.ids)
    return EncodedConversation(ids, mask, spans)


def encode_turn(
    template: ChatTemplate, message: Message, replies: Sequence[Message], tools: Tools
) -> list[int]:
    """Encode an assistant message as a policy would have sampled it, with its end.

    Args:
        template: The chat template.
        message: The assistant's message.
        replies: The messages after it; in some templates the end of the turn depends on them.
        tools: The schemas in the prompt.
    """
    read = template.read([message], tools)
    compiled = template.learn_once("turn", read.key, lambda: _find_turn(template, read))
    if compiled is None:
        ids = _encode_raw(template, spoken_text(message))
    else:
        ids = compiled.encode(read.texts)
    if not ids or ids[-1] not in template.stop_token_ids:
        # The template does not end the turn; a policy samples its end.
        structure = template.structure
        stop = structure.encoder.encode_literal(structure.end_of_turn.text)
        if replies:
            stop = template.encode_delta(replies, last_ids=(), tools=tools).end_of_turn_ids
        ids += stop or list(template.stop_token_ids[:1])
    return ids


def _find_turn(template: ChatTemplate, read: ShapedConversation) -> CompiledTemplate | None:
    """Find what the template writes for an assistant message after its generation prompt.

    Returns None if the template rewrites the message there.
    """
    structure = template.structure
    user = context_slot(0)
    asked = {"role": "user", "content": user}
    slots = [user, *read.slots]
    tools, before = read.tools.nodes or structure.needed_tools, [*structure.preface, asked]
    opened = str(cut(structure.render_node(before, tools, True), slots)[-1])
    closed = _after(learn(structure.render_node([*before, *read.nodes], tools, False), slots), user)
    lead = str(closed[0])
    if not lead.startswith(opened) and "tool_calls" not in read.nodes[0]:
        return None
    start = common_length(lead, opened, structure.encoder.control_pattern)
    pieces: list[Piece] = [lead[start:], *closed[1:]]
    pieces[-1] = up_to_end(structure, str(pieces[-1]))
    return template.compile(pieces)


def _after(pieces: Sequence[Piece], slot: Slot) -> Sequence[Piece]:
    """Return the pieces after the first use of a slot."""
    for number, piece in enumerate(pieces):
        if isinstance(piece, SlotUse) and piece.slot.number == slot.number:
            return pieces[number + 1 :]
    raise TemplateError("the chat template drops the text of a user message", role="user")


def up_to_end(structure: TemplateStructure, literal: str) -> str:
    """Cut a turn's last literal after the text that ends the turn, without the separator."""
    end = structure.end_of_turn
    if end.is_written and end.text in literal:
        return literal[: literal.index(end.text) + len(end.text)]
    control = list(structure.encoder.control_pattern.finditer(literal))
    return literal[: control[-1].end()] if control else literal.rstrip()


def _encode_raw(template: ChatTemplate, text: str) -> list[int]:
    """Encode an answer that the template would not write after this generation prompt.

    Such a prompt opens a thought. An answer with a thought continues it; one without a thought
    closes it first.
    """
    structure = template.structure
    text = follow_prompt(structure, text)
    end = (
        structure.end_of_turn.text
        if structure.end_of_turn.is_written
        else structure.last_end_of_turn
    )
    return template.encode_policy_text(text) + structure.encoder.encode_literal(end)


def spoken_text(message: Message) -> str:
    """Return a message's text, preceded by its thought if that is in a field of its own."""
    extra = message.model_extra or {}
    thought = next((extra[name] for name in REASONING_FIELDS if extra.get(name)), None)
    if not isinstance(thought, str):
        return message.text
    opening, closing = next(iter(THOUGHTS.items()))
    return f"{opening}\n{thought}\n{closing}\n\n{message.text}"


def follow_prompt(structure: TemplateStructure, text: str) -> str:
    """Return what a policy writes after a generation prompt that may open a thought."""
    prompt = structure.generation_prompt
    for opening, closing in THOUGHTS.items():
        if opens_thought(prompt, {opening: closing}):
            text = re.sub(rf"\A\s*{re.escape(opening)}\n?", "", text)
            text = text if closing in text else f"\n{closing}\n\n{text}"
    return text


THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which templates expect a thought separate from the answer."""


class Framed(NamedTuple):
    """What a turn says."""

    content: str
    fields: Mapping[str, str]
    """A thought for which the template has a field of its own, by the field's name."""


@dataclass(frozen=True, slots=True)
class TurnFrames:
    """What a template writes around the texts of an assistant turn; empty if nothing.

    Frames that the template itself reads in a content (`<think>` in many) are not included.
    """

    opening: str = ""
    """The end of the generation prompt that opens a thought."""
    before: str = ""
    """Before an answer."""
    after: str = ""
    """After an answer, or after a thought and an answer, without the turn's end."""
    thought_field: str = ""
    """Name of the field of a thought; empty: thoughts stay in the content."""
    thought: str = ""
    """Before a thought."""
    between: str = ""
    """Between a thought and its answer."""
    thoughts: Mapping[str, str] = field(default_factory=lambda: USUAL_THOUGHTS)
    """Opening and closing tags of thoughts in the template."""
    calls: re.Pattern[str] | None = None
    """Matches the rest of the wrapper of calls after the calls were removed."""

    def read(self, text: str, *, num_calls: int, starts_in_thought: bool) -> Framed:
        """Return what a turn says.

        Args:
            text: The turn without its calls and its stop token.
            num_calls: Number of calls that were removed.
            starts_in_thought: Whether the prompt of the turn left a thought open.
        """
        if num_calls and self.calls:
            text = self.calls.sub("", text).strip()
        text = text.removesuffix(self.after)
        # A parser strips what is left after it removed the calls.
        between = self.between.strip() if num_calls else self.between
        is_thought = between in text or self.thought or starts_in_thought
        if self.thought_field and text.startswith(self.thought) and is_thought:
            # A turn that only calls after its thought has no answer, whose frame `between` opens.
            closing = self.thoughts.get(self.thought.strip())
            if num_calls and closing and between not in text and text.endswith(closing):
                return Framed("", {self.thought_field: text[len(self.thought) : -len(closing)]})
            thought, _, answer = text.removeprefix(self.thought).partition(between)
            if num_calls:
                head, tail = self.between.split(between, 1)
                thought, answer = thought.removesuffix(head), answer.removeprefix(tail)
            return Framed(answer, {self.thought_field: thought})
        if self.before:
            text = text.removeprefix(self.before)
        return Framed(self.opening + text if text and starts_in_thought else text, {})


def find_frames(template: ChatTemplate, parser: ToolParser) -> TurnFrames:
    """Find a template's frames.

    Args:
        template: The run's template.
        parser: Finds the calls in a turn.
    """
    structure = template.structure
    opening = _find_opening(structure)
    calls = _find_wrapper(template, parser)
    try:
        before, after = _find_answer(template)
    except TemplateError:
        before = after = ""  # the template opens an older answer without a thought differently
    found = _find_thought(template)
    own = _tags_of(structure, opening, found)
    tags = dict(structure.thought_tags) | own
    # Scorers know the usual tags only, so that they need a content without other ones.
    is_apart = own.keys() - THOUGHTS.keys() or _needs_field(template, opening, after, found)
    name, thought, between = found if is_apart else ("",) * 3
    return TurnFrames(opening, before, after, name, thought, between, tags, calls)


def _find_opening(structure: TemplateStructure) -> str:
    try:
        prompt = structure.generation_prompt
    except TemplateError:
        return ""
    found = ((prompt.rfind(start), prompt.rfind(end)) for start, end in THOUGHTS.items())
    starts = [start for start, end in found if start > end]
    return prompt[max(starts) :] if starts else ""


def _find_answer(template: ChatTemplate) -> tuple[str, str]:
    """Return what is before and after an answer, unless the template reads it in a content."""
    [before, after] = _literals(template, {"content": context_slot(1, TextOrigin.POLICY)}, [1])
    own = _render(template.structure, content=f"{before}Yes.{after}")
    is_read = own == _render(template.structure, content="Yes.")
    return ("", "") if is_read else (before, after)


class _ThoughtFrame(NamedTuple):
    """The field of a thought, and what the template writes before and after it."""

    field: str = ""
    before: str = ""
    after: str = ""


def _tags_of(structure: TemplateStructure, opening: str, found: _ThoughtFrame) -> dict[str, str]:
    """Return the tags of a thought in its own field, if they look like tags."""
    control, tag = structure.encoder.control_pattern, re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
    start, end = (opening or found.before).strip(), found.after.strip()
    closing = control.search(end) or tag.search(end)
    if not closing or not (control.search(start) or tag.search(start)):
        return {}
    return {start: closing[0]}


def _needs_field(template: ChatTemplate, opening: str, after: str, found: _ThoughtFrame) -> bool:
    """Whether the template writes a thought in a content differently from one in its field."""
    if not found.field:
        return False
    content = f"{opening}{found.before}Hm.{found.after}Yes.{after}"
    inside = _render(template.structure, content=content)
    return inside != _render(template.structure, content="Yes.", **{found.field: "Hm."})


def _find_thought(template: ChatTemplate) -> _ThoughtFrame:
    """Return the field of a thought and its frame; all empty if there is none."""
    for name in THOUGHT_FIELDS:
        try:
            found = _literals(
                template,
                {
                    "content": context_slot(1, TextOrigin.POLICY),
                    name: context_slot(2, TextOrigin.POLICY),
                },
                [2, 1],
            )
        except TemplateError:
            continue
        if len(found) == 3 and found[1].strip():
            return _ThoughtFrame(name, found[0], found[1])
    return _ThoughtFrame()


def _literals(template: ChatTemplate, message: dict[str, Slot], order: list[int]) -> list[str]:
    """Return the literals of an assistant turn after the generation prompt, without its end.

    Raises:
        TemplateError: if its texts are not in this order.
    """
    structure, asked = template.structure, context_slot(0, TextOrigin.POLICY)
    slots = [asked, *message.values()]
    question = {"role": "user", "content": asked}
    opened = str(cut(structure.render_after_preface([question], True), [asked])[-1])
    nodes = [question, {"role": "assistant", **message}]
    pieces = cut(structure.render_after_preface(nodes, False), slots)
    if slots_in_order(pieces) != [CONTEXT_SLOT, *(CONTEXT_SLOT + number for number in order)]:
        raise TemplateError("the template writes the texts of a turn in another order")
    lead, *rest = (str(piece) for piece in pieces[2::2])
    if not lead.startswith(opened):
        raise TemplateError("the template opens an older turn differently")
    start = common_length(lead, opened, structure.encoder.control_pattern)
    end = up_to_end(structure, rest[-1])
    stop = next((s for s in template.stop_texts.values() if s and end.endswith(s)), "")
    return [lead[start:], *rest[:-1], end.removesuffix(stop)]


def _render(structure: TemplateStructure, **message: str) -> str | None:
    nodes = [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}]
    try:
        return structure.render_after_preface(nodes, False)({})
    except TemplateError:
        return None


def _find_wrapper(template: ChatTemplate, parser: ToolParser) -> re.Pattern[str] | None:
    """Make the pattern of what is left of a call's wrapper after the call was removed."""
    if template.structure.call_style is None:
        return None
    try:
        ids = encode_turn(template, call_message("Oslo"), [result_message()], [tool_schema()])
    except TemplateError:
        return None
    text = template.decode(ids[:-1] if ids[-1] in template.stop_token_ids else ids)
    parsed = parser.parse(text, tools=[tool_schema()])
    spans = [call.span for call in parsed.calls]
    if len(spans) != 1 or spans[0] is None or not parsed.content.strip():
        return None
    before, after = text[: spans[0][0]].strip(), text[spans[0][1] :].strip()
    if not before or not after:
        # A thought is no wrapper; a token of the format before or after each call is one.
        alone = template.structure.policy_tokens.fullmatch(before + after)
        is_thought = before + after in template.structure.thought_tags.values()
        return re.compile(re.escape(before + after)) if alone and not is_thought else None
    return re.compile(re.escape(before) + r"\s*" + re.escape(after))
