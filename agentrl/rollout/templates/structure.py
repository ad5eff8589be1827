"""The structure of a template, found by rendering: prompt, ends of turns, policy tokens."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from agentrl.errors import TemplateError
from agentrl.messages import THOUGHTS, USUAL_THOUGHTS, Message, opens_thought
from agentrl.rollout.templates.cutting import Piece, Render, common_length, cut, slots_in_order
from agentrl.rollout.templates.delta import DeltaFinder, EndOfTurn, opening_of
from agentrl.rollout.templates.probe_conversations import tool_schema
from agentrl.rollout.templates.rendering import Renderer
from agentrl.rollout.templates.slots import (
    CallStyle,
    Node,
    Pairs,
    ShapeBuilder,
    ShapeOptions,
    Slot,
    TextOrigin,
    as_arguments,
    context_slot,
    fill,
)
from agentrl.rollout.templates.text import TextEncoder, any_of

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of an assistant message that hold a thought separate from its text."""

_EXCERPT = 60
_SCHEMA = tool_schema().to_template()
_STYLES = tuple(
    CallStyle(arguments_as_json=as_json, empty_content=content)
    for as_json in (False, True)
    for content in ("", None)
)

_METHODS = frozenset(
    {"split", "rsplit", "partition", "startswith", "endswith", "find", "index", "count", "replace"}
)


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings that a template compares texts with."""

    inside: tuple[str, ...]
    """Searched within a text: `'x' in text`, `text.split('x')`, `text.startswith('x')`."""
    whole: tuple[str, ...]
    """Compared with a whole value: `value == 'x'`."""


def find_markers(source: str) -> Markers:
    """Find the markers in the tokens of a template's source."""
    from jinja2 import Environment

    lexed = Environment().lex(source)
    tokens = [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
    around = [("", ""), ("", ""), *tokens, ("", "")]
    inside: list[str] = []
    whole: list[str] = []
    for index, (kind, text) in enumerate(around):
        if kind != "string":
            continue
        # A Jinja string may contain newlines, unlike Python's.
        value = text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
        before, opening, after = around[index - 2][1], around[index - 1][1], around[index + 1][1]
        if (opening == "(" and before in _METHODS) or after in ("in", "not"):
            inside.append(value)
        elif {opening, after} & {"==", "!="}:
            whole.append(value)
    return Markers(tuple(dict.fromkeys(inside)), tuple(dict.fromkeys(whole)))


class TemplateStructure:
    """Parts of one chat template; each is found on first use.

    Args:
        renderer: Renders the template.
        encoder: Knows the tokenizer's control tokens.
        eos_id: The tokenizer's own end of sequence.
        model_stops: Tokens that end the model's generation, whatever the template writes.
        placeholders: Tokens that stand for images and videos. No policy may write them.
    """

    def __init__(
        self,
        renderer: Renderer,
        encoder: TextEncoder,
        eos_id: int | None,
        model_stops: Sequence[int] = (),
        placeholders: Iterable[str] = (),
    ) -> None:
        self.renderer = renderer
        self.encoder = encoder
        self._eos_id = eos_id
        self._model_stops = tuple(model_stops)
        self._placeholders = frozenset(placeholders)

    @cached_property
    def generation_prompt(self) -> str:
        """The text that opens an assistant turn; empty if an answer directly follows the user.

        Raises:
            TemplateError: if the template writes nothing, and an answer does not directly follow.
        """
        user = context_slot(0)
        messages = [_message("user", user)]
        opened, closed = (
            str(cut(self.render_after_preface(messages, gen), [user])[-1]) for gen in (True, False)
        )
        prompt = opened[common_length(opened, closed, self._control) :]
        if not prompt and (reason := self._why_not_silent(closed)):
            raise TemplateError(
                f"the chat template writes no generation prompt: {reason}",
                template=self.renderer.name,
                role="assistant",
                expected="text under `add_generation_prompt`; see model.custom_chat_template",
            )
        return prompt

    @cached_property
    def alternating(self) -> list[Piece]:
        """The pieces of a user, an assistant and a user message.

        Raises:
            TemplateError: if the template refuses them.
        """
        slots = user, answer, other = [context_slot(number) for number in range(3)]
        turns = [_message("user", user), _message("assistant", answer), _message("user", other)]
        return cut(self.render_after_preface(turns, False), slots)

    def _why_not_silent(self, closed: str) -> str:
        """Return why an answer cannot directly follow a user's turn, which ends in `closed`."""
        try:
            pieces = self.alternating
        except TemplateError as error:
            return f"it refuses an assistant message ({error.args[0]})"
        if slots_in_order(pieces) != [context_slot(number).number for number in range(3)]:
            return "it does not write each message once, in order"
        if opening_of(pieces, context_slot(1), closed).strip():
            opening = str(pieces[2])[-_EXCERPT:]
            return (
                f"after a user it writes {closed[-_EXCERPT:]!r} with and without "
                f"`add_generation_prompt`, and before an answer {opening!r}"
            )
        if closed.strip() == str(pieces[4]).strip():
            return "a user's turn ends as an assistant's does"
        return ""

    @cached_property
    def starts_in_thought(self) -> bool:
        """Whether the generation prompt leaves a thought open."""
        return opens_thought(self.generation_prompt, THOUGHTS)

    @cached_property
    def closes_thought(self) -> bool:
        """Whether the generation prompt closes a thought, so that a policy does not think."""
        prompt = self.generation_prompt
        return not self.starts_in_thought and any(end in prompt for end in THOUGHTS.values())

    @property
    def thought_tags(self) -> dict[str, str]:
        """The tags of thoughts in the template; the usual ones if it has none."""
        known = {a: b for a, b in THOUGHTS.items() if a in self.renderer.source}
        return known or USUAL_THOUGHTS

    @property
    def thinks(self) -> bool:
        """Whether the template supports thoughts."""
        return self.reasoning_field is not None or any(
            tag in self.renderer.source for pair in THOUGHTS.items() for tag in pair
        )

    @cached_property
    def end_of_turn(self) -> EndOfTurn:
        """How a plain answer ends if a user follows."""
        return self.finder((), ()).end_of_turn()

    @cached_property
    def last_end_of_turn(self) -> str:
        """What ends the last turn of a conversation, if that is another token; else empty."""
        if self.end_of_turn.is_written:
            return ""
        user, answer = context_slot(0), context_slot(1)
        nodes = [_message("user", user), _message("assistant", answer)]
        last = cut(self.render_after_preface(nodes, False), [user, answer])[-1]
        found = self._control.search(str(last))
        return found.group() if found else ""

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        found = [] if self._eos_id is None else [self._eos_id]
        answer = self.last_end_of_turn or self.end_of_turn.text
        result = Message(role="tool", content="result", name="tool", tool_call_id="call00000")
        builder = ShapeBuilder(ShapeOptions(any_of(()), self.call_style or CallStyle()))
        try:
            calls = self.finder((), ()).find(builder.messages([result]), builder.slots).end
        except TemplateError:
            calls = ""  # no tool results: no turn ends in a call
        for end in (answer, calls):
            found += self.encoder.encode_literal(end)[-1:] if end else []
        return tuple(dict.fromkeys([*found, *self._model_stops]))

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the template expects tool calls; None if it does not support them."""
        return None if isinstance(self._found_style, str) else self._found_style

    @property
    def why_no_calls(self) -> str:
        """Why the template does not support tool calls; empty if it does."""
        return self._found_style if isinstance(self._found_style, str) else ""

    @cached_property
    def _found_style(self) -> CallStyle | str:
        """How the template expects tool calls, or why it does not support them."""
        why = "the template leaves out the name or the arguments of a tool call"
        for tools, style in product(((), (_SCHEMA,)), _STYLES):
            try:
                if self._carries_calls(style, tools):
                    return style
            except TemplateError as error:
                why = f"the template refuses a tool call ({error.args[0]})"
        return why

    @cached_property
    def markers(self) -> Markers:
        """Strings that the template looks for in texts."""
        return find_markers(self.renderer.source)

    @cached_property
    def options(self) -> ShapeOptions:
        """How messages are read for this template.

        A policy's text is cut at the strings that the template looks for, so that the template
        itself can process the parts. A single word is ignored: it is the name of a field.
        """
        separators = any_of(
            marker
            for marker in self.markers.inside
            if re.search(r"[^\w\s]", marker)
            and all(map(self.policy_tokens.fullmatch, self._control.findall(marker)))
        )
        shown = list(filter(self.encoder.is_inert, self._looked_for))
        style = self.call_style or CallStyle()
        return ShapeOptions(separators, style, any_of(shown) if shown else None)

    @cached_property
    def hidden_markers(self) -> dict[TextOrigin, re.Pattern[str]]:
        """Strings that the template looks for in texts, but that its rendering does not see.

        Control tokens in an outside text are not among them: those are hidden on purpose.
        """
        options, looked_for = self.options, self._looked_for
        policy = (text for text in looked_for if not options.separators.fullmatch(text))
        unseen = (t for t in looked_for if not (options.shown and options.shown.fullmatch(t)))
        plain = (text for text in unseen if not self._control.search(text))
        return {TextOrigin.POLICY: any_of(policy), TextOrigin.OUTSIDE: any_of(plain)}

    @property
    def _looked_for(self) -> list[str]:
        """Strings that a template looks for in texts, without single words: those name fields."""
        markers = [*self.markers.inside, *self.markers.whole]
        return [text for text in markers if re.search(r"\w.*[^\w.]|[^\w.].*\w", text, re.DOTALL)]

    @cached_property
    def text_options(self) -> ShapeOptions:
        """How messages are read if only the text matters and nothing is encoded."""
        return replace(self.options, keeps_numbers_apart=True)

    @cached_property
    def policy_tokens(self) -> re.Pattern[str]:
        """Control tokens that a policy may write inside its turn (a thought, a call)."""
        source, special = self.renderer.source, self.encoder.special
        in_use = {t for t in self.encoder.control if t not in special or t in source}
        stops = {t for t in in_use if self.encoder.added[t] in self.stop_token_ids}
        # A tag that opens every turn of a template is part of its frame, and a policy may write it.
        frames = self._frame_tokens.difference(*self.thought_tags.items())
        return any_of(in_use - stops - frames - self._placeholders)

    @property
    def preface(self) -> tuple[Node, ...]:
        """What the template requires before a first user message: nothing, or a system message."""
        return self._setting[0]

    @property
    def needed_tools(self) -> tuple[Node, ...]:
        """A tool's schema if the template fails without tools; else nothing."""
        return self._setting[1]

    @cached_property
    def _setting(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        text = "Be brief."
        for tools, preface in product(((), (_SCHEMA,)), ((), (_message("system", text),))):
            try:
                self.render_node([*preface, _message("user", text)], tools, True)({})
            except TemplateError:
                continue
            return preface, tools
        return (), ()

    @cached_property
    def reasoning_field(self) -> str | None:
        """The field in which the template looks for a thought; None if there is none."""
        found = (
            name
            for name in REASONING_FIELDS
            if re.search(rf"[.'\"]{name}\b(?!_)", self.renderer.source)
        )
        return next(found, None)

    def render_node(self, messages: Sequence[Node], tools: Sequence[Node], gen: bool) -> Render:
        """Return the function that renders these nodes with texts in their slots."""

        def render(texts: Mapping[int, str]) -> str:
            return self.renderer.render(
                fill(list(messages), texts), fill(list(tools), texts), add_generation_prompt=gen
            )

        return render

    def render_after_preface(self, messages: Sequence[Node], gen: bool) -> Render:
        """Do the same for messages that start with a user, after the preface."""
        return self.render_node([*self.preface, *messages], self.needed_tools, gen)

    def finder(self, tools: Sequence[Node], tool_slots: Sequence[Slot]) -> DeltaFinder:
        """Return the finder of deltas in conversations with these tools."""
        shown = tools or self.needed_tools
        return DeltaFinder(
            lambda messages, gen: self.render_node([*self.preface, *messages], shown, gen),
            self._control,
            self.call_style or CallStyle(),
            tool_slots,
        )

    @property
    def _control(self) -> re.Pattern[str]:
        return self.encoder.control_pattern

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template writes a message's text only if the content is a list of parts."""
        user = context_slot(0)
        try:
            texts = [user, [{"type": "text", "text": user}]]
            found = [
                slots_in_order(cut(self.render_after_preface([_message("user", t)], True), [user]))
                for t in texts
            ]
        except TemplateError:
            return False
        return found == [[], [user.number]]

    @cached_property
    def _frame_tokens(self) -> set[str]:
        """Control tokens that frame turns, except those inside a policy's own turn."""
        user, answer, other = context_slot(0), context_slot(1), context_slot(2)
        first, reply = _message("user", user), _message("assistant", answer)
        literals = self._literals([_message("system", other), first], after=None)
        literals += [self._opening(first)]
        for role in ("user", "tool"):
            followed = [*self.preface, first, reply, _message(role, other)]
            literals += self._literals(followed, after=answer)
        return {token for text in literals for token in self._control.findall(text)}

    def _literals(self, nodes: list[Node], *, after: Slot | None) -> list[str]:
        """Return the literals of a rendering, or those after a slot."""
        try:
            render = self.render_node(nodes, self.needed_tools, False)
            pieces = cut(render, [context_slot(0), context_slot(1), context_slot(2)])
        except TemplateError:
            return []
        literals = [str(piece) for piece in pieces[0::2]]
        uses = slots_in_order(pieces)
        if after is None:
            return literals
        return literals[uses.index(after.number) + 1 :] if after.number in uses else []

    def _opening(self, first: Node) -> str:
        """Return the common opening of an assistant turn in history and as a generation prompt."""
        slots = [context_slot(0), context_slot(1)]
        try:
            pieces = cut(
                self.render_after_preface([first, _message("assistant", context_slot(1))], False),
                slots,
            )
            prompt = cut(self.render_after_preface([first], True), slots)
        except TemplateError:
            return ""
        opened = str(pieces[2]) if len(pieces) > 2 else ""
        return opened[: common_length(opened, str(prompt[-1]), self._control)]

    def _carries_calls(self, style: CallStyle, tools: Sequence[Node]) -> bool:
        slots = [context_slot(number) for number in range(4)]
        arguments = as_arguments(Pairs(((slots[2], slots[3]),)), style)
        function = {"name": slots[1], "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        calls = _message("assistant", style.empty_content) | {"tool_calls": [call]}
        nodes = [*self.preface, _message("user", slots[0]), calls]
        pieces = cut(self.render_node(nodes, tools or self.needed_tools, False), slots)
        return {slot.number for slot in slots[1:]} <= set(slots_in_order(pieces))


def _message(role: str, content: Node) -> dict[str, Node]:
    return {"role": role, "content": content}
