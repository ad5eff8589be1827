"""What a conversation looks like without its texts: its shape, with a hole for each text.

The shape is what a template may branch on (roles, kinds of fields, which texts are empty); it is
the key under which renderings are cached. The texts stay outside of it. A text that is empty or
blank is part of the shape, since templates treat those differently and they hold no control token.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from agentrl.messages import Message, OpenAIFunctionToolSchema, ToolCall

T = TypeVar("T")

SHORTEST_ID = 9
"""Call ids from this length on keep their length in a rendering (templates may check it)."""
LONGEST_ID = 40
MAX_SHOWN = 17
"""Pieces of a text from outside, shown ones included; a text of more is not shown to a template."""
HOLE_WIDTH = 32
"""Digits of a placeholder."""
NUMBER_WIDTH = 24
"""Digits of a placeholder that stands for a number."""


# fmt: off
SCHEMA_WORDS = frozenset({
    "type", "function", "name", "description", "parameters", "properties", "required", "strict",
    "items", "prefixItems", "enum", "const", "default", "examples", "title", "format", "pattern",
    "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "nullable", "additionalProperties",
    "patternProperties", "propertyNames", "dependentRequired", "$ref", "$defs", "definitions",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "uniqueItems", "contains", "minProperties",
    "maxProperties", "return", "object", "string", "number", "integer", "boolean", "array", "null",
})
"""Words by which templates find their way in a tool's schema; they are never kept apart."""
# fmt: on


class Voice(StrEnum):
    """Who speaks in a text, which decides how it is encoded."""

    OUTSIDE = "outside"
    """Rows, users, tools, errors: plain characters."""
    POLICY = "policy"
    """Assistant turns: the control tokens that a policy may write inside its turn are live."""

    __repr__ = str.__repr__


class Hole(NamedTuple):
    """The place of one text. Its representation is short: it stands in a shape's key."""

    number: int
    """Place among the conversation's texts."""
    message: int
    """Index of its message; -1 for a tool's schema."""
    voice: Voice
    is_content: bool
    """Whether it is (part of) the message's content, not a name or an argument."""
    width: int = HOLE_WIDTH
    """Length of its placeholder."""
    is_number: bool = False
    """Whether the template is given a number there."""

    __repr__ = tuple.__repr__


@dataclass(frozen=True, slots=True)
class Joined:
    """A text of several holes with visible separators between them."""

    parts: tuple["str | Hole", ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A mapping whose keys may be holes."""

    items: tuple[tuple["str | Hole", "Node"], ...]

    def __repr__(self) -> str:
        return f"Pairs{self.items}"  # of a shape's key, which is made for every turn


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value that the template is given as a string of JSON."""

    value: "Node"


Node = Any
"""JSON-like: dict, list, str, number, None, with `Hole`, `Joined`, `Pairs`, `JsonText` in it."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template wants an assistant message with tool calls."""

    arguments_as_json: bool = False
    """Arguments as a string of JSON, not as a mapping."""
    empty_content: str | None = ""
    """Content of a message that has none; None for the value null."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How messages are read into shapes for one template."""

    separators: re.Pattern[str]
    """Where a policy's text is cut, because the template looks for these in it."""
    calls: CallStyle = CallStyle()
    shown: re.Pattern[str] | None = None
    """What the template looks for in texts from outside: it is shown these parts of them. None of
    them can be a part of a control token. None: it looks for nothing."""
    keeps_numbers_apart: bool = False
    """Whether numbers in calls are holes too: fewer shapes, for readings that become no tokens (a
    tokenizer may join a number with the blank before it)."""


@dataclass(frozen=True, slots=True)
class PreparedTools:
    """Schemas as nodes, with the texts that must not enter a rendering."""

    schemas: tuple[OpenAIFunctionToolSchema, ...]
    """Kept so that their identity stays theirs while they are cached."""
    nodes: list[Node]
    holes: list[Hole]
    texts: list[str]


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as a shape and its texts."""

    nodes: list[Node]
    tools: PreparedTools
    message_holes: list[Hole]
    message_texts: list[str]

    @property
    def holes(self) -> list[Hole]:
        """All holes, in the order of their numbers."""
        return [*self.tools.holes, *self.message_holes]

    @property
    def texts(self) -> list[str]:
        """The text of each hole."""
        return [*self.tools.texts, *self.message_texts]

    @cached_property
    def key(self) -> tuple[tuple[int, ...], str]:
        """Equal for conversations that a template treats alike."""
        return tuple(map(id, self.tools.schemas)), shape_key(self.nodes)


class ShapeBuilder:
    """Read messages and tools into nodes; collects holes and texts."""

    def __init__(self, reading: Reading, *, first_hole: int = 0) -> None:
        self._reading = reading
        self._first_hole = first_hole
        self._message = -1
        self._ids: dict[str, str | Hole] = {}
        self.holes: list[Hole] = []
        self.texts: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Node]:
        """Nodes of messages, in order."""
        nodes: list[Node] = []
        for index, message in enumerate(messages):
            self._message = index
            nodes.append(self._read_message(message))
        return nodes

    def schema(self, value: Any, is_inert: Callable[[str], bool]) -> Node:
        """Nodes of a tool's schema: words that can do no harm stay, equal texts share a hole."""
        shared: dict[str, str | Hole] = {}

        def word(text: str) -> "str | Hole":
            if text in SCHEMA_WORDS or is_inert(text):
                return text
            if text not in shared:
                shared[text] = self.hole(text)
            return shared[text]

        return _structure(value, word)

    def hole(
        self,
        text: str,
        voice: Voice = Voice.OUTSIDE,
        *,
        is_content: bool = False,
        width: int = HOLE_WIDTH,
        is_number: bool = False,
    ) -> "str | Hole":
        """Keep a text apart and return its hole; blank texts are returned as they are."""
        if not text or text.isspace():
            return text
        number = self._first_hole + len(self.holes)
        hole = Hole(number, self._message, voice, is_content, width, is_number)
        self.holes.append(hole)
        self.texts.append(text)
        return hole

    def _read_message(self, message: Message) -> dict[str, Node]:
        voice = Voice.POLICY if message.role == "assistant" else Voice.OUTSIDE
        node: dict[str, Node] = {"role": message.role}
        if message.tool_call_id is not None:
            node["tool_call_id"] = self._read_id(message.tool_call_id)
        if message.name is not None:
            node["name"] = self.hole(message.name)
        if message.model_extra:
            node |= self._read_extra(message, voice)
        if message.tool_calls:
            node["content"] = self._reading.calls.empty_content
            node["tool_calls"] = [self._read_call(call) for call in message.tool_calls]
        if message.content or not message.tool_calls:
            node["content"] = self._read_text(message.text, voice, is_content=True)
        return node

    def _read_extra(self, message: Message, voice: Voice) -> dict[str, Node]:
        """Fields that the vocabulary does not know, such as a thought kept apart."""
        known = type(message).model_fields
        given = {key: value for key, value in message.to_template().items() if key not in known}
        return {
            key: self._read_text(value, voice, is_content=False)
            if isinstance(value, str)
            else _structure(value, self.hole)
            for key, value in given.items()
        }

    def _read_text(self, text: str, voice: Voice, *, is_content: bool) -> Node:
        is_outside = voice is Voice.OUTSIDE
        separators = self._reading.shown if is_outside else self._reading.separators
        pieces = _cut_at(separators, text) if separators else [text]
        if len(pieces) == 1 or (is_outside and len(pieces) > MAX_SHOWN):
            return self.hole(text, voice, is_content=is_content)
        return Joined(
            tuple(
                piece if place % 2 else self.hole(piece, voice, is_content=is_content)
                for place, piece in enumerate(pieces)
            )
        )

    def _read_call(self, call: ToolCall) -> dict[str, Node]:
        number = self._number if self._reading.keeps_numbers_apart else _as_it_is
        arguments = _structure(call.function.arguments, self.hole, number)
        return {
            "id": self._read_id(call.id),
            "type": call.type,
            "function": {
                "name": self.hole(call.function.name),
                "arguments": as_arguments(arguments, self._reading.calls),
            },
        }

    def _number(self, value: float) -> "str | Hole":
        return self.hole(json.dumps(value), width=NUMBER_WIDTH, is_number=True)

    def _read_id(self, text: str) -> "str | Hole":
        """Keep an id apart; equal ids share a hole, since templates look calls up by their ids."""
        if text not in self._ids:
            keeps_length = SHORTEST_ID <= len(text) <= LONGEST_ID
            self._ids[text] = self.hole(text, width=len(text) if keeps_length else HOLE_WIDTH)
        return self._ids[text]


def as_arguments(arguments: Node, style: CallStyle) -> Node:
    """Arguments of a call in the form that a template wants."""
    return JsonText(arguments) if style.arguments_as_json else arguments


def shape_key(node: Node) -> str:
    """The shape as a string: equal for conversations that a template treats alike."""
    return repr(node)


def fill(node: Node, texts: Mapping[int, str]) -> Any:
    """Put texts into the holes; `texts` maps a hole's index to its text."""
    if isinstance(node, Hole):
        return int(texts[node.number]) if node.is_number else texts[node.number]
    if isinstance(node, Joined):
        return "".join(fill(part, texts) for part in node.parts)
    if isinstance(node, Pairs):
        return {fill(key, texts): fill(value, texts) for key, value in node.items}
    if isinstance(node, JsonText):
        return json.dumps(fill(node.value, texts), ensure_ascii=False)
    if isinstance(node, dict):
        return {key: fill(value, texts) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, texts) for value in node]
    return node


def _as_it_is(value: T) -> T:
    return value


def _structure(
    value: Any,
    word: Callable[[str], "str | Hole"],
    number: Callable[[float], Node] = _as_it_is,
) -> Node:
    """Nodes of a JSON-like value; `word` and `number` say what stands for a string or a number."""
    if isinstance(value, str):
        return word(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        items = value.items()
        return Pairs(tuple((word(str(k)), _structure(item, word, number)) for k, item in items))
    if isinstance(value, list | tuple):
        return [_structure(item, word, number) for item in value]
    return value


def _cut_at(separators: re.Pattern[str], text: str) -> list[str]:
    """Pieces of a text: outside and inside of separators, alternating."""
    pieces: list[str] = []
    start = 0
    for match in separators.finditer(text):
        pieces += [text[start : match.start()], match.group()]
        start = match.end()
    return [*pieces, text[start:]]
