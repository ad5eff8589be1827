"""Find out what a template does to the texts that it gets, position by position."""

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.errors import TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.templates.cutting import Piece, SlotUse, learn, written_text
from agentrl.rollout.templates.probe.report import TextReport, TextTransform
from agentrl.rollout.templates.probe_conversations import (
    THOUGHT,
    answer_message,
    call_message,
    reason_of,
    result_message,
    tool_schema,
    user_message,
    with_preface,
)
from agentrl.rollout.templates.slots import ShapedConversation, fill, shape_key
from agentrl.rollout.templates.template import ChatTemplate

MAX_MARKERS = 6
"""Markers of a template that are tried, alone and in pairs."""
AWKWARD = "é ß 漢 🙂 \t \"quoted\" 'single' \\ / <b> & {{ x }} {% y %} \u2028 e\u0301"
"""Characters that an escape would change."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position of text in a conversation."""

    name: str
    messages_with: Callable[[str], tuple[list[Message], list[OpenAIFunctionToolSchema]]]
    """Returns messages and tools that hold a text."""
    opens: bool = True
    """Whether a generation prompt follows."""


POSITIONS = (
    Position("system", lambda t: ([Message(role="system", content=t), user_message()], [])),
    Position(
        "user", lambda t: ([user_message("Hello"), answer_message(THOUGHT), user_message(t)], [])
    ),
    Position(
        "assistant", lambda t: ([user_message(), answer_message(t), user_message("And now?")], [])
    ),
    Position(
        "tool",
        lambda t: ([user_message(), call_message("Oslo"), result_message(t)], [tool_schema()]),
    ),
    Position(
        "tool name",
        lambda t: ([user_message(), call_message("Oslo", name=t), result_message(name=t)], []),
    ),
    Position(
        "call argument", lambda t: ([user_message(), call_message(t)], [tool_schema()]), opens=False
    ),
    Position("tool description", lambda t: ([user_message()], [tool_schema(t)])),
)


class TextProbe:
    """Tries texts in the positions of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._learned: dict[str, list[Piece]] = {}

    def probe(self, position: Position) -> TextReport:
        """Report what the template does to the texts of a position."""
        core = _word()
        try:
            plain = self._render_real(position, core)
        except TemplateError as error:
            return TextReport(position.name, (TextTransform.REFUSES,), False, reason_of(error))
        if core not in plain:
            return TextReport(position.name, (TextTransform.DROPS,), True)
        transforms = self._learned_transforms(position, core)
        missed = ""
        for text in self._texts_to_try(core):
            transform, is_exact = self._try(position, text)
            transforms += [] if transform is None else [transform]
            missed = missed or ("" if is_exact else text.replace(core, "..."))
        unique = tuple(dict.fromkeys(transforms)) or (TextTransform.VERBATIM,)
        return TextReport(position.name, unique, not missed, repr(missed) if missed else "")

    def _learned_transforms(self, position: Position, core: str) -> list[TextTransform]:
        """Return the transforms that `learn` found."""
        # A text with a control token gets a slot even in a schema.
        text = f"{next(iter(self._template.structure.encoder.control), '')} {core}"
        read, pieces = self._learn(position, text)
        found: list[TextTransform] = []
        for piece in pieces:
            if isinstance(piece, SlotUse) and core in read.texts[piece.slot.number]:
                found += [TextTransform.TRIMS] if piece.strips_left or piece.strips_right else []
                if piece.escape.name == "unknown":
                    found.append(TextTransform.REWRITES)
                elif piece.escape.name != "verbatim":
                    found.append(TextTransform.ESCAPES)
        return found

    def _try(self, position: Position, text: str) -> tuple[TextTransform | None, bool]:
        """Return the transform of one text, and whether compiling reproduces it."""
        try:
            read, pieces = self._learn(position, text)
            ours = written_text(pieces, dict(enumerate(read.texts)))
        except TemplateError:
            ours = None
        try:
            real = self._render_real(position, text)
        except TemplateError:
            return TextTransform.BRANCHES, ours is None
        words = [word for word in text.split() if word.startswith("word")]
        loss = TextTransform.SPLITS if any(word not in real for word in words) else None
        return (loss, True) if real == ours else (loss or TextTransform.BRANCHES, False)

    def _texts_to_try(self, core: str) -> list[str]:
        """Make texts with blanks, special characters, and strings that the template looks for."""
        markers, other = self._template.structure.markers, _word()
        inside = [marker for marker in markers.inside if marker.strip()][:MAX_MARKERS]
        texts = [core, f"\n {core}\t\n", f"{core}\n\n  {other}", f"{core} {AWKWARD}"]
        texts += [marker for marker in markers.whole if marker.strip()]
        for marker in inside:
            texts += [f"{marker} {core}", f"{core} {marker}", f"{core} {marker} {other}"]
            texts.append(f"\n{core}\n{marker}\n\n{other}")
        return texts + [f"{a}{core}{b}" for a, b in itertools.product(inside, inside)]

    def _render_real(self, position: Position, text: str) -> str:
        """Return what the template writes if the messages contain the text itself."""
        read, tools = self._read(position, text)
        return self._template.structure.renderer.render(
            fill(read.nodes, dict(enumerate(read.texts))),
            [tool.to_template() for tool in tools],
            add_generation_prompt=position.opens,
        )

    def _read(
        self, position: Position, text: str
    ) -> tuple[ShapedConversation, list[OpenAIFunctionToolSchema]]:
        messages, tools = position.messages_with(text)
        whole = with_preface(self._template.structure.preface, messages)
        return self._template.read(whole, tools), tools

    def _learn(self, position: Position, text: str) -> tuple[ShapedConversation, list[Piece]]:
        """Read a text in its position, and learn each shape once."""
        read, _ = self._read(position, text)
        key = position.name + shape_key([read.nodes, read.tools.nodes])
        if key not in self._learned:
            render = self._template.structure.render_node(
                read.nodes, read.tools.nodes, position.opens
            )
            self._learned[key] = learn(render, read.slots)
        return read, self._learned[key]


def _word() -> str:
    return f"word{secrets.randbelow(10**12):012d}"
