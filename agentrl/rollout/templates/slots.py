"""The shape of a conversation: its structure, with a slot for each text.

A template can branch on the shape: on roles, on kinds of fields, on which texts are empty. The
shape is the key under which renderings are cached. It does not contain the texts, except blank
ones: templates treat those differently, and they hold no control token.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from agentrl.media.records import MediaItem
from agentrl.messages import Message, OpenAIFunctionToolSchema, ToolCall

T = TypeVar("T")

SHORTEST_ID = 9
"""Call ids of at least this length keep their length in a rendering, because templates may check
it."""
LONGEST_ID = 40
MAX_SHOWN = 17
"""Maximum pieces of an outside text that is cut at `shown`; a text with more is not cut."""
SLOT_WIDTH = 32
"""Digits of a placeholder."""
NUMBER_WIDTH = 24
"""Digits of the placeholder of a number."""


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
"""Words that templates look for in a tool's schema; they never become slots."""
# fmt: on


class TextOrigin(StrEnum):
    """Who wrote a text. This decides how it is encoded."""

    OUTSIDE = "outside"
    """Rows, users, tools, errors: encoded as plain characters."""
    POLICY = "policy"
    """Assistant turns: the control tokens that a policy may write inside its turn are encoded as
    such."""
    MEDIA = "media"
    """What a model's processor writes for an image or a video: encoded as the template itself."""

    __repr__ = str.__repr__


class Slot(NamedTuple):
    """A placeholder for one text. Its representation is short: it is part of a shape's key."""

    number: int
    """Index among the conversation's texts."""
    message: int
    """Index of its message; -1 for a tool's schema."""
    origin: TextOrigin
    is_content: bool
    """Whether the text is (part of) the message's content, not a name or an argument."""
    width: int = SLOT_WIDTH
    """Length of its placeholder."""
    is_number: bool = False
    """Whether the template gets a number, not a string."""

    __repr__ = tuple.__repr__


CONTEXT_SLOT = 1_000_000
"""Slots with this number or a higher one belong to context messages and never get a text."""


def context_slot(number: int, origin: TextOrigin = TextOrigin.OUTSIDE) -> Slot:
    """Return a slot for a context message: a fixed message around those that are rendered."""
    return Slot(CONTEXT_SLOT + number, -1, origin, is_content=False)


@dataclass(frozen=True, slots=True)
class Concat:
    """A text of several slots, with separators between them that the template sees."""

    parts: tuple["str | Slot", ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A mapping whose keys may be slots."""

    items: tuple[tuple["str | Slot", "Node"], ...]

    def __repr__(self) -> str:
        return f"Pairs{self.items}"  # part of a shape's key, which is made for every turn


@dataclass(frozen=True, slots=True)
class JsonText:
    """A value that the template gets as a string of JSON."""

    value: "Node"


Node = Any
"""A JSON-like value that may contain `Slot`, `Concat`, `Pairs` and `JsonText`."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template expects an assistant message with tool calls."""

    arguments_as_json: bool = False
    """Whether arguments are a string of JSON, not a mapping."""
    empty_content: str | None = ""
    """The content of a message without text; None for the value null."""


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """How messages are read into shapes for one template."""

    separators: re.Pattern[str]
    """A policy's text is cut at these strings, because the template looks for them in it."""
    calls: CallStyle = CallStyle()
    shown: re.Pattern[str] | None = None
    """An outside text is cut at these strings, because the template looks for them in it. No string
    can be a part of a control token. None: the template looks for nothing.
    """
    keeps_numbers_apart: bool = False
    """Whether numbers in calls become slots too. This gives fewer shapes. Only for texts that are
    not encoded, because a tokenizer may join a number with the blank before it."""
    assistant: TextOrigin = TextOrigin.POLICY
    """Origin of the texts of assistant messages."""


@dataclass(frozen=True, slots=True)
class PreparedTools:
    """Tool schemas as nodes, with slots for the texts that must not enter a rendering."""

    schemas: tuple[OpenAIFunctionToolSchema, ...]
    """The schemas; a reference keeps their `id` unique while they are cached."""
    nodes: list[Node]
    slots: list[Slot]
    texts: list[str]


@dataclass(frozen=True)
class ShapedConversation:
    """Messages and tools as a shape and its texts."""

    nodes: list[Node]
    tools: PreparedTools
    message_slots: list[Slot]
    message_texts: list[str]
    media: list[MediaItem] = field(default_factory=list[MediaItem])
    """The images and videos, in the order of their slots."""

    @property
    def slots(self) -> list[Slot]:
        """All slots, in the order of their numbers."""
        return [*self.tools.slots, *self.message_slots]

    @property
    def texts(self) -> list[str]:
        """The text of each slot."""
        return [*self.tools.texts, *self.message_texts]

    @property
    def media_slots(self) -> list[Slot]:
        """The slots of images and videos, in order."""
        return [slot for slot in self.message_slots if slot.origin is TextOrigin.MEDIA]

    @property
    def items(self) -> dict[int, MediaItem]:
        """The image or video of each such slot, by the slot's number."""
        numbers = [slot.number for slot in self.media_slots]
        return dict(zip(numbers, self.media, strict=True))

    @cached_property
    def key(self) -> tuple[tuple[int, ...], str]:
        """Equal for conversations that a template treats alike."""
        return tuple(map(id, self.tools.schemas)), shape_key(self.nodes)


class ShapeBuilder:
    """Reads messages and tools into nodes, and collects slots and texts."""

    def __init__(self, options: ShapeOptions, *, first_slot: int = 0) -> None:
        self._reading = options
        self._first_hole = first_slot
        self._message = -1
        self._ids: dict[str, str | Slot] = {}
        self.slots: list[Slot] = []
        self.texts: list[str] = []
        self.media: list[MediaItem] = []

    def messages(self, messages: Sequence[Message]) -> list[Node]:
        """Return the nodes of messages, in order."""
        nodes: list[Node] = []
        for index, message in enumerate(messages):
            self._message = index
            nodes.append(self._read_message(message))
        return nodes

    def schema(self, value: Any, is_inert: Callable[[str], bool]) -> Node:
        """Return the nodes of a tool's schema. Harmless words stay; equal texts share a slot."""
        shared: dict[str, str | Slot] = {}

        def word(text: str) -> "str | Slot":
            if text in SCHEMA_WORDS or is_inert(text):
                return text
            if text not in shared:
                shared[text] = self.slot(text)
            return shared[text]

        return _structure(value, word)

    def slot(
        self,
        text: str,
        origin: TextOrigin = TextOrigin.OUTSIDE,
        *,
        is_content: bool = False,
        width: int = SLOT_WIDTH,
        is_number: bool = False,
    ) -> "str | Slot":
        """Store a text and return its slot; return a blank text unchanged."""
        if not text or text.isspace():
            return text
        number = self._first_hole + len(self.slots)
        slot = Slot(number, self._message, origin, is_content, width, is_number)
        self.slots.append(slot)
        self.texts.append(text)
        return slot

    def _read_message(self, message: Message) -> dict[str, Node]:
        is_assistant = message.role == "assistant"
        origin = self._reading.assistant if is_assistant else TextOrigin.OUTSIDE
        node: dict[str, Node] = {"role": message.role}
        if message.tool_call_id is not None:
            node["tool_call_id"] = self._read_id(message.tool_call_id)
        if message.name is not None:
            node["name"] = self.slot(message.name)
        if message.model_extra:
            node |= self._read_extra(message, origin)
        if message.tool_calls:
            node["content"] = self._reading.calls.empty_content
            node["tool_calls"] = [self._read_call(call) for call in message.tool_calls]
        if message.content or not message.tool_calls:
            node["content"] = self._read_content(message, origin)
        return node

    def _read_content(self, message: Message, origin: TextOrigin) -> Node:
        """Read a text, or parts in order if there are images or videos among them."""
        parts = message.content if isinstance(message.content, list) else []
        if all(part.item is None for part in parts):
            return self._read_text(message.text, origin, is_content=True)
        nodes: list[Node] = []
        for part in parts:
            if part.item is not None:
                self._add_media(part.item)
                nodes.append({"type": str(part.item.kind)})
            elif part.type == "text":
                text = self._read_text(part.text or "", origin, is_content=True)
                nodes.append({"type": "text", "text": text})
        return nodes

    def _add_media(self, item: MediaItem) -> None:
        """Add the slot of an image or video. The template writes a placeholder in its place."""
        number = self._first_hole + len(self.slots)
        self.slots.append(Slot(number, self._message, TextOrigin.MEDIA, is_content=False))
        self.texts.append(item.text)
        self.media.append(item)

    def _read_extra(self, message: Message, origin: TextOrigin) -> dict[str, Node]:
        """Read fields outside the message schema, such as a separate thought."""
        known = type(message).model_fields
        given = {key: value for key, value in message.to_template().items() if key not in known}
        return {
            key: self._read_text(value, origin, is_content=False)
            if isinstance(value, str)
            else _structure(value, self.slot)
            for key, value in given.items()
        }

    def _read_text(self, text: str, origin: TextOrigin, *, is_content: bool) -> Node:
        is_outside = origin is TextOrigin.OUTSIDE
        separators = self._reading.shown if is_outside else self._reading.separators
        pieces = _cut_at(separators, text) if separators else [text]
        if len(pieces) == 1 or (is_outside and len(pieces) > MAX_SHOWN):
            return self.slot(text, origin, is_content=is_content)
        return Concat(
            tuple(
                piece if index % 2 else self.slot(piece, origin, is_content=is_content)
                for index, piece in enumerate(pieces)
            )
        )

    def _read_call(self, call: ToolCall) -> dict[str, Node]:
        number = self._number if self._reading.keeps_numbers_apart else _as_it_is
        arguments = _structure(call.function.arguments, self.slot, number)
        return {
            "id": self._read_id(call.id),
            "type": call.type,
            "function": {
                "name": self.slot(call.function.name),
                "arguments": as_arguments(arguments, self._reading.calls),
            },
        }

    def _number(self, value: float) -> "str | Slot":
        return self.slot(json.dumps(value), width=NUMBER_WIDTH, is_number=True)

    def _read_id(self, text: str) -> "str | Slot":
        """Store an id. Equal ids share a slot, since templates look calls up by their ids."""
        if text not in self._ids:
            keeps_length = SHORTEST_ID <= len(text) <= LONGEST_ID
            self._ids[text] = self.slot(text, width=len(text) if keeps_length else SLOT_WIDTH)
        return self._ids[text]


def as_arguments(arguments: Node, style: CallStyle) -> Node:
    """Return a call's arguments in the form that a template expects."""
    return JsonText(arguments) if style.arguments_as_json else arguments


def shape_key(node: Node) -> str:
    """Return the shape as a string: equal for conversations that a template treats alike."""
    return repr(node)


def fill(node: Node, texts: Mapping[int, str]) -> Any:
    """Put texts into the slots; `texts` maps a slot's number to its text."""
    if isinstance(node, Slot):
        return int(texts[node.number]) if node.is_number else texts[node.number]
    if isinstance(node, Concat):
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
    word: Callable[[str], "str | Slot"],
    number: Callable[[float], Node] = _as_it_is,
) -> Node:
    """Return the nodes of a value; `word` and `number` convert its strings and numbers."""
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
    """Split a text at separators: texts and separators alternate."""
    pieces: list[str] = []
    start = 0
    for match in separators.finditer(text):
        pieces += [text[start : match.start()], match.group()]
        start = match.end()
    return [*pieces, text[start:]]
