"""Messages, tool calls and tool schemas in the format of OpenAI.

Unknown data is kept: extra fields of a message, content parts of other types, and every JSON Schema
keyword of a tool.
"""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self, cast

import jsonschema
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_TEXT_OR_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_QUOTED = {
    "NaN": r'"\u004eaN"',
    "Infinity": r'"\u0049nfinity"',
    "-Infinity": r'"-\u0049nfinity"',
}

Role = Literal["system", "developer", "user", "assistant", "tool"]

USUAL_THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
"""Opening and closing tags of thoughts, for a template that has none of its own."""
THOUGHTS = USUAL_THOUGHTS | {
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<longcat_think>": "</longcat_think>",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
}
"""All known tags of thoughts. Others are learned from the template."""


def opens_thought(text: str, tags: Mapping[str, str]) -> bool:
    """Whether a text ends inside a thought."""
    return any(text.rfind(start) > text.rfind(end) for start, end in tags.items())


class ContentPart(BaseModel):
    """One part of a content with several parts."""

    model_config = ConfigDict(extra="allow")

    type: str
    """`text`, `image`, `image_url`, `video`, ... as in the row."""
    text: str | None = None
    """The text of a `text` part."""
    shown: Literal[False] | None = None
    """False if the part has no tokens: an image of a tool, if the model reads text only."""
    item: Any = Field(default=None, exclude=True, repr=False)
    """The processed image or video (`agentrl.media.records.MediaItem`). It is not written to JSON,
    and chat templates do not see it."""

    @classmethod
    def kept(cls, type: str) -> "ContentPart":
        """Make the placeholder of an image or a video of a tool."""
        return cls(type=type, shown=False)


class FunctionCall(BaseModel):
    """Name and arguments of a tool call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Decoded arguments. A JSON string, as OpenAI sends it, is decoded."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        return json.loads(value or "{}") if isinstance(value, str) else value


class ToolCall(BaseModel):
    """One tool call in an assistant message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class CallOutcome(StrEnum):
    """How one tool call ended."""

    OK = "ok"
    TOOL_ERROR = "tool_error"
    """The tool raised `ToolError`. The model sees its text."""
    MALFORMED = "malformed"
    """The call could not be parsed, or its tool or arguments are not valid. It was not executed."""
    TIMEOUT = "timeout"
    """The tool did not answer in time. The call was abandoned."""
    CRASHED = "crashed"
    """The tool raised another error, or returned a value that is not a result."""
    UNAVAILABLE = "unavailable"
    """The circuit breaker is open: the tool failed too often, so it was not called."""
    SKIPPED = "skipped"
    """The request ended before the call. It was not executed."""


class Message(BaseModel):
    """One message of a conversation.

    Example:
        >>> Message(role="user", content="What is 2 + 3?").text
        'What is 2 + 3?'
    """

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """Id of the call that a tool message answers."""
    name: str | None = None
    """Name of the tool that a tool message is from."""

    @property
    def text(self) -> str:
        """The text parts, joined without a separator as chat templates write them; else empty.

        The gateway joins the blocks of its clients by line breaks, into one text.
        """
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content if part.type == "text")
        return self.content or ""

    @property
    def parts(self) -> list[ContentPart]:
        """The content parts; empty if the content is one text."""
        return self.content if isinstance(self.content, list) else []

    @property
    def part_types(self) -> list[str]:
        """The type of each content part; empty if the content is one text."""
        return [part.type for part in self.parts]

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: a dict without absent keys."""
        return self.model_dump(exclude_none=True)


def dump_json(
    value: Any, *, indent: int | None = None, default: Any = None, for_file: bool = False
) -> str:
    """Write a value as JSON; see `strict_json` for numbers that are not finite.

    Args:
        value: What is written.
        indent: Blanks of a level; None: one line.
        default: As of `json.dumps`.
        for_file: Whether to escape what is not ASCII. Halves of surrogate pairs cannot be encoded.
    """
    return strict_json(json.dumps(value, ensure_ascii=for_file, indent=indent, default=default))


def strict_json(text: str) -> str:
    """Quote the numbers that are not finite (`NaN`, `-Infinity`), as other programs need it.

    Their first letter is escaped, which no other text is, so `restore_numbers` finds them.
    """
    if "NaN" not in text and "Infinity" not in text:
        return text
    return _TEXT_OR_CONSTANT.sub(lambda found: _QUOTED.get(found[0], found[0]), text)


def restore_numbers(line: bytes) -> bytes:
    """Undo `strict_json`, for readers that know Python's constants."""
    for constant, quoted in _QUOTED.items():
        line = line.replace(quoted.encode(), constant.encode())
    return line


def schema_validator(schema: Mapping[str, Any]) -> Any:
    """Return the validator class for the draft of a JSON Schema; 2020-12 if it names none."""
    return validator_for(schema, default=jsonschema.Draft202012Validator)


def without_nulls(schema: Any) -> Any:
    """Return a JSON Schema without the keywords that are null, as verl's `model_dump` writes them.

    A null that is a value (`default`, `const`, in lists) is kept.

    Example:
        >>> without_nulls({"type": "string", "enum": None, "default": None})
        {'type': 'string', 'default': None}
    """
    if isinstance(schema, list):
        return [without_nulls(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    items = cast("Mapping[str, Any]", schema).items()
    kept = ((k, v) for k, v in items if v is not None or k in ("default", "const"))
    return {key: value if key in _VALUES else without_nulls(value) for key, value in kept}


_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Keywords of JSON Schema with values, not schemas."""


class OpenAIFunctionSchema(BaseModel):
    """Name, description and JSON Schema of a tool's parameters; unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(
        default_factory=lambda: {"type": "object", "properties": {}, "required": []}
    )
    """Any JSON Schema of an object: nested, `anyOf`, `items`, `default`, `$defs`."""
    strict: bool | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def _of_record(cls, value: Any) -> Any:
        return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value

    @field_validator("parameters")
    @classmethod
    def _is_json_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            schema_validator(value).check_schema(without_nulls(value))
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema: {error.message}") from None
        return value


_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})
"""Keywords of JSON Schema that can declare properties outside of `properties`."""


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as the model sees it. `model_dump` returns exactly what was read."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.function.name

    def undeclared_required(self) -> list[str]:
        """Return required parameters that are not declared: no call can match such a schema."""
        parameters = self.function.parameters
        if not _ELSEWHERE.isdisjoint(parameters):
            return []
        declared: dict[str, Any] = parameters.get("properties") or {}
        return [name for name in parameters.get("required") or () if name not in declared]

    def to_template(self) -> dict[str, Any]:
        """Return the schema as chat templates expect it, without keys that were not set."""
        return self.model_dump(exclude_unset=True, exclude_none=True) | {"type": self.type}


class ToolResponse(BaseModel):
    """What a call (or the creation) of a tool adds to the conversation."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _media_are_lists(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in ("image", "video"):
                if data.get(key) is not None and not isinstance(data[key], list):  # pyright: ignore
                    raise ValueError(f"{key} must be a list with one entry for each {key}")
        return data  # pyright: ignore[reportUnknownVariableType]

    @property
    def media(self) -> dict[str, list[Any]]:
        """Images and videos by kind, without empty kinds."""
        kinds = {"image": self.image, "video": self.video}
        return {kind: values for kind, values in kinds.items() if values}

    @property
    def wording(self) -> str:
        """The text; if there are only images or videos, `[image]` or `[video]` for each."""
        return self.text or " ".join(f"[{kind}]" for kind in self._kinds)

    def content(self, text: str) -> str | list[ContentPart]:
        """Return the content of the message for this response, with `text` as its text.

        Images, videos and the text become parts, in this order. A text alone is a string.
        """
        media = [ContentPart.kept(kind) for kind in self._kinds]
        return [*media, ContentPart(type="text", text=text)] if media else text

    @property
    def _kinds(self) -> list[str]:
        return [kind for kind, values in self.media.items() for _ in values]

    def is_empty(self) -> bool:
        """Whether there is nothing to append."""
        return not self.text and not self.media

    @classmethod
    def of(cls, value: Self | str | dict[str, Any] | None) -> "ToolResponse":
        """Convert what users return: a response, a string, or a dict (shown as JSON)."""
        if isinstance(value, ToolResponse):
            return value
        if value is None or isinstance(value, str):
            return cls(text=value)
        return cls(text=dump_json(value))
