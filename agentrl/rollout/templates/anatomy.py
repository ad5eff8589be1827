"""What a template is made of, found by rendering it: its prompt, ends, frames and live tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates.delta import NEIGHBOUR, DeltaFinder, EndOfTurn
from agentrl.rollout.templates.markers import Markers, find_markers
from agentrl.rollout.templates.rendering import Renderer
from agentrl.rollout.templates.shape import (
    CallStyle,
    Hole,
    Node,
    Pairs,
    Reading,
    ShapeBuilder,
    Voice,
    as_arguments,
    fill,
)
from agentrl.rollout.templates.splice import Render, common_length, cut, places_in_order
from agentrl.rollout.templates.text import TextEncoder, any_of

THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
"""Tags that open and close a thought."""

_STYLES = tuple(
    CallStyle(arguments_as_json=as_json, empty_content=content)
    for as_json in (False, True)
    for content in ("", None)
)


class Anatomy:
    """Parts of one chat template, each found when it is first asked for.

    Args:
        renderer: Renders the template.
        encoder: Knows the tokenizer's control tokens.
        eos_id: The tokenizer's own end of sequence.
        model_stops: Tokens that the model's generation ends at, whatever the template writes.
    """

    def __init__(
        self,
        renderer: Renderer,
        encoder: TextEncoder,
        eos_id: int | None,
        model_stops: Sequence[int] = (),
    ) -> None:
        self.renderer = renderer
        self.encoder = encoder
        self._eos_id = eos_id
        self._model_stops = tuple(model_stops)

    @cached_property
    def generation_prompt(self) -> str:
        """What opens an assistant turn.

        Raises:
            TemplateError: where the template writes nothing.
        """
        user = _hole(0)
        messages = [_message("user", user)]
        opened, closed = (
            str(cut(self.render_behind_preface(messages, gen), [user])[-1]) for gen in (True, False)
        )
        prompt = opened[common_length(opened, closed, self._control) :]
        if not prompt:
            raise TemplateError(
                "the chat template writes no generation prompt",
                template=self.renderer.name,
                role="assistant",
                expected="text under `add_generation_prompt`; see model.custom_chat_template",
            )
        return prompt

    @cached_property
    def starts_in_thought(self) -> bool:
        """Whether the generation prompt leaves a thought open."""
        prompt = self.generation_prompt
        return any(prompt.rfind(start) > prompt.rfind(end) for start, end in THOUGHTS.items())

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thoughts."""
        return any(tag in self.renderer.source for pair in THOUGHTS.items() for tag in pair)

    @cached_property
    def end_of_turn(self) -> EndOfTurn:
        """How a plain answer ends when a user follows."""
        return self.finder((), ()).end_of_turn()

    @cached_property
    def last_end_of_turn(self) -> str:
        """What ends the last turn of a conversation, where that is another token; else empty."""
        if self.end_of_turn.is_written:
            return ""
        user, answer = _hole(0), _hole(1)
        nodes = [_message("user", user), _message("assistant", answer)]
        last = cut(self.render_behind_preface(nodes, False), [user, answer])[-1]
        found = self._control.search(str(last))
        return found.group() if found else ""

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        found = [] if self._eos_id is None else [self._eos_id]
        answer = self.last_end_of_turn or self.end_of_turn.text
        for end in (answer, self._end_of_calls):
            found += self.encoder.encode_literal(end)[-1:] if end else []
        return tuple(dict.fromkeys([*found, *self._model_stops]))

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the template wants tool calls; None where it cannot carry them."""
        return next((style for style in _STYLES if self._carries_calls(style)), None)

    @cached_property
    def markers(self) -> Markers:
        """Strings that the template looks for in texts."""
        return find_markers(self.renderer.source)

    @cached_property
    def reading(self) -> Reading:
        """How messages are read for this template.

        A policy's text is cut where the template looks for something in it, so that the template
        itself does with the parts what it does. A bare word is the name of a field.
        """
        separators = any_of(
            marker
            for marker in self.markers.inside
            if re.search(r"[^\w\s]", marker)
            and all(map(self.live_tokens.fullmatch, self._control.findall(marker)))
        )
        shown = list(filter(self.encoder.is_inert, self._looked_for))
        style = self.call_style or CallStyle()
        return Reading(separators, style, any_of(shown) if shown else None)

    @cached_property
    def hidden_markers(self) -> dict[Voice, re.Pattern[str]]:
        """What the template looks for in texts, and is not shown in them.

        Control tokens in a text from outside are left out: they are hidden on purpose.
        """
        reading, looked_for = self.reading, self._looked_for
        policy = (text for text in looked_for if not reading.separators.fullmatch(text))
        unseen = (t for t in looked_for if not (reading.shown and reading.shown.fullmatch(t)))
        plain = (text for text in unseen if not self._control.search(text))
        return {Voice.POLICY: any_of(policy), Voice.OUTSIDE: any_of(plain)}

    @property
    def _looked_for(self) -> list[str]:
        """Strings that a template looks for in texts; a bare word is the name of a field."""
        markers = [*self.markers.inside, *self.markers.whole]
        return [text for text in markers if re.search(r"\w.*[^\w.]|[^\w.].*\w", text, re.DOTALL)]

    @cached_property
    def text_reading(self) -> Reading:
        """How messages are read where only the text matters, and no tokens are made of it."""
        return replace(self.reading, keeps_numbers_apart=True)

    @cached_property
    def live_tokens(self) -> re.Pattern[str]:
        """Control tokens that a policy may write inside its turn (a thought, a call)."""
        source, special = self.renderer.source, self.encoder.special
        in_use = {t for t in self.encoder.control if t not in special or t in source}
        stops = {t for t in in_use if self.encoder.added[t] in self.stop_token_ids}
        return any_of(in_use - stops - self._frame_tokens)

    @cached_property
    def preface(self) -> tuple[Node, ...]:
        """What a template wants before a first user message: nothing, or a system message."""
        text = "Be brief."
        for preface in ((), (_message("system", text),)):
            try:
                self.render_node([*preface, _message("user", text)], (), True)({})
            except TemplateError:
                continue
            return preface
        return ()

    def render_node(self, messages: Sequence[Node], tools: Sequence[Node], gen: bool) -> Render:
        """Make the function that renders these nodes with texts in their holes."""

        def render(texts: Mapping[int, str]) -> str:
            return self.renderer.render(
                fill(list(messages), texts), fill(list(tools), texts), add_generation_prompt=gen
            )

        return render

    def render_behind_preface(self, messages: Sequence[Node], gen: bool) -> Render:
        """Like `render_node`, for neighbours that begin with a user."""
        return self.render_node([*self.preface, *messages], (), gen)

    def finder(self, tools: Sequence[Node], tool_holes: Sequence[Hole]) -> DeltaFinder:
        """Find deltas in conversations with these tools."""
        return DeltaFinder(
            lambda messages, gen: self.render_node([*self.preface, *messages], tools, gen),
            self._control,
            self.call_style or CallStyle(),
            tool_holes,
        )

    @property
    def _control(self) -> re.Pattern[str]:
        return self.encoder.control_pattern

    @cached_property
    def _end_of_calls(self) -> str:
        result = Message(role="tool", content="result", name="tool", tool_call_id="call00000")
        builder = ShapeBuilder(Reading(any_of(()), self.call_style or CallStyle()))
        try:
            return self.finder((), ()).find(builder.messages([result]), builder.holes).end
        except TemplateError:
            return ""  # no tool results: no turn ends in a call

    @cached_property
    def _frame_tokens(self) -> set[str]:
        """Control tokens that frame turns, other than inside a policy's own."""
        user, answer, other = _hole(0), _hole(1), _hole(2)
        first, reply = _message("user", user), _message("assistant", answer)
        literals = self._literals([_message("system", other), first], behind=None)
        literals += [self._opening(first)]
        for role in ("user", "tool"):
            followed = [*self.preface, first, reply, _message(role, other)]
            literals += self._literals(followed, behind=answer)
        return {token for text in literals for token in self._control.findall(text)}

    def _literals(self, nodes: list[Node], *, behind: Hole | None) -> list[str]:
        """Literals of a rendering, or of what is in it behind a hole."""
        try:
            pieces = cut(self.render_node(nodes, (), False), [_hole(0), _hole(1), _hole(2)])
        except TemplateError:
            return []
        literals = [str(piece) for piece in pieces[0::2]]
        places = places_in_order(pieces)
        if behind is None:
            return literals
        return literals[places.index(behind.number) + 1 :] if behind.number in places else []

    def _opening(self, first: Node) -> str:
        """What opens an assistant turn in history and as a generation prompt alike."""
        holes = [_hole(0), _hole(1)]
        try:
            pieces = cut(
                self.render_behind_preface([first, _message("assistant", _hole(1))], False), holes
            )
            prompt = cut(self.render_behind_preface([first], True), holes)
        except TemplateError:
            return ""
        opened = str(pieces[2]) if len(pieces) > 2 else ""
        return opened[: common_length(opened, str(prompt[-1]), self._control)]

    def _carries_calls(self, style: CallStyle) -> bool:
        holes = [_hole(number) for number in range(4)]
        arguments = as_arguments(Pairs(((holes[2], holes[3]),)), style)
        function = {"name": holes[1], "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        calls = _message("assistant", style.empty_content) | {"tool_calls": [call]}
        try:
            nodes = [_message("user", holes[0]), calls]
            pieces = cut(self.render_behind_preface(nodes, False), holes)
        except TemplateError:
            return False
        return {hole.number for hole in holes[1:]} <= set(places_in_order(pieces))


def _hole(number: int) -> Hole:
    return Hole(NEIGHBOUR + number, -1, Voice.OUTSIDE, is_content=False)


def _message(role: str, content: Node) -> dict[str, Node]:
    return {"role": role, "content": content}
