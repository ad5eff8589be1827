"""Read the rows of a dataset as prompts or as conversations.

Arrow gives every struct of a column the same keys, and fills missing values with nulls. So in every
format a null counts as absent, and so does a mapping that has only nulls. Columns whose structure
varies may also be JSON texts. They are decoded, and their nulls are kept.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.config.schema.run import DataConfig
from agentrl.data.files import Row, read_rows
from agentrl.errors import DataError
from agentrl.media.records import MediaKind
from agentrl.messages import ContentPart, Message, OpenAIFunctionToolSchema


class Prompt(BaseModel):
    """One row: a conversation to continue, the settings of its plug-ins, and its ground truth.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "data_source": "sums"}
        >>> Prompt(index=0, messages=row["prompt"], data_source=row["data_source"]).index
        0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    index: int
    """Index of the row in its files, before shuffling."""
    messages: list[Message] = Field(min_length=1)
    data_source: str = "unknown"
    """Name of the data source. It selects the scorer."""
    ground_truth: Any = None
    """From the row's `reward_model.ground_truth`."""
    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The whole `extra_info` of the row."""
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """From `extra_info.tools_kwargs`."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """From `extra_info.interaction_kwargs`."""
    tool_selection: list[str] | None = None
    """From `extra_info.tool_selection`: names of tools; None: see
    `rollout.multi_turn.tools_per_row`."""
    columns: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further columns of the row (`ability`, `agent_name`, ...)."""
    multi_modal_data: dict[str, list[Any]] = Field(default_factory=dict[str, list[Any]])
    """Sources of the images and videos by kind, in the order of the parts of that type in
    `messages`. They are decoded when a request starts."""


_MESSAGES = "a list of messages, each with `role` and `content`, or a text"
_MARKS = re.compile("|".join(f"<{kind}>" for kind in MediaKind))
_PART_KINDS = {f"{kind}{suffix}": kind for kind in MediaKind for suffix in ("", "_url")}
"""The types of content parts that show an image or a video."""

_EXTRA_INFO_KEYS = ("tools_kwargs", "interaction_kwargs", "tool_selection", "need_tools_kwargs")


class RowReader:
    """Read the rows of one file.

    Args:
        file: File name for errors.
        config: Names of the columns, and how strictly rows are checked.
    """

    def __init__(self, file: str | Path, config: DataConfig | None = None) -> None:
        self._file = str(file)
        self._config = config or DataConfig()
        self._prompt_key = self._config.prompt_key
        self._reward_fn_key = self._config.reward_fn_key

    def read(self, row: Row, number: int, index: int) -> Prompt:
        """Read one row.

        Args:
            row: Columns of the row, as in the file.
            number: Index of the row in the file, for errors.
            index: Index of the row over all files.

        Raises:
            DataError: With file, row number and what was expected.
        """
        columns = (self._config.image_key, self._config.video_key)
        media = {key: row[key] for key in columns if key in row}
        given: Row = without_nulls({key: row[key] for key in row if key not in media}) or {}
        messages = self._messages(given, number)
        extra_info = self._mapping(given.get("extra_info"), "extra_info", number)
        try:
            prompt = self._prompt(given, messages, extra_info, number, index)
        except ValidationError as error:
            raise self._error(_describe(error, self._prompt_key), number, _MESSAGES) from None
        return self._with_media(prompt, media, number)

    def _with_media(self, prompt: Prompt, media: Row, number: int) -> Prompt:
        keys = {MediaKind.IMAGE: self._config.image_key, MediaKind.VIDEO: self._config.video_key}
        try:
            placed = place_media(prompt.messages, media, keys)
        except DataError as error:
            raise self._error(str(error.args[0]), number, str(error.expected)) from None
        if placed is None:
            return prompt
        messages, sources = placed
        return prompt.model_copy(update={"messages": messages, "multi_modal_data": sources})

    def _prompt(
        self, row: Row, messages: list[Any], extra_info: Row, number: int, index: int
    ) -> Prompt:
        reward_model = self._mapping(row.get("reward_model"), "reward_model", number)
        tools_kwargs = self._mapping(extra_info.get("tools_kwargs"), "tools_kwargs", number)
        needs = self._config.strict_rows and extra_info.get("need_tools_kwargs")
        if needs and not tools_kwargs:
            reason = "extra_info.need_tools_kwargs is true, but there are no tools_kwargs"
            raise self._error(
                reason, number, "extra_info.tools_kwargs: {tool: {create_kwargs: ...}}"
            )
        for name in _EXTRA_INFO_KEYS:
            if row.get(name) and not extra_info.get(name):
                reason = f"{name!r} is a column of its own, which is not read"
                raise self._error(reason, number, f"extra_info.{name}")
        named = {self._prompt_key, self._reward_fn_key, "reward_model", "extra_info"}
        truth = reward_model.get("ground_truth")
        if isinstance(truth, float) and not math.isfinite(truth):
            reason = f"reward_model.ground_truth is {truth}, as pandas writes a missing value"
            raise self._error(reason, number, "the right answer, or null if the row has none")
        return Prompt(
            index=index,
            messages=messages,
            data_source=str(row.get(self._reward_fn_key, "unknown")),
            ground_truth=truth,
            extra_info=extra_info,
            tools_kwargs=tools_kwargs,
            interaction_kwargs=self._mapping(
                extra_info.get("interaction_kwargs"), "interaction_kwargs", number
            ),
            tool_selection=extra_info.get("tool_selection"),
            columns={name: value for name, value in row.items() if name not in named},
        )

    def _messages(self, row: Row, number: int) -> list[Any]:
        if self._prompt_key not in row:
            reason = f"a row without {self._prompt_key!r}: it has {', '.join(row) or 'no column'}"
            raise self._error(
                reason, number, f"{_MESSAGES}, in the column that data.prompt_key names"
            )
        found: Any = row[self._prompt_key]
        if isinstance(found, str):
            # A question may start with "[". Only a list of mappings is a conversation.
            decoded = _decoded(found) if found.lstrip().startswith("[") else None
            messages = cast("list[Any]", decoded) if isinstance(decoded, list) else []
            if messages and all(isinstance(message, dict) for message in messages):
                return messages
            return [{"role": "user", "content": found}]
        if not isinstance(found, list) or not found:
            reason = f"{self._prompt_key!r} is {_shown(row[self._prompt_key])}"
            raise self._error(reason, number, _MESSAGES)
        return cast("list[Any]", found)

    def _mapping(self, value: Any, name: str, number: int) -> Row:
        found = _decoded(value)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._error(f"{name} is {_shown(value)}", number, "a mapping, or one as JSON")
        return cast("Row", found)

    def _error(self, reason: str, number: int, expected: str) -> DataError:
        return DataError(reason, file=self._file, row=number, expected=expected)


def place_media(
    given: Sequence[Message], media: Row, keys: Mapping[MediaKind, str]
) -> tuple[list[Message], dict[str, list[Any]]] | None:
    """Put the images and videos of a row's columns in the places of their marks.

    Args:
        given: The messages of the row.
        media: The row's columns of images and videos; a column without a key does not exist.
        keys: The names of these columns.

    Returns:
        The messages with a part for each image and video, and their sources by kind in the order of
        the parts; None for a row of text.

    Raises:
        DataError: If there is not one mark, or one part without a source, for each.
    """
    if not media and not any(message.part_types for message in given):
        return None
    columns = {kind: _sources(media.get(key)) for kind, key in keys.items()}
    marked = {kind for kind in MediaKind if keys[kind] in media}
    messages = [_split_marks(message, marked) for message in given]
    left = {kind: list(sources) for kind, sources in columns.items()}
    found: dict[str, list[Any]] = {}
    num_asked = dict.fromkeys(MediaKind, 0)
    for part in (part for message in messages for part in message.parts):
        if (shown := source_of_part(part)) is None:
            continue
        kind, own = shown
        num_asked[kind] += own is None
        if own is None and left[kind]:
            own = left[kind].pop(0)
        found.setdefault(str(kind), []).append(own)
    for kind, key in keys.items():
        if num_asked[kind] != len(columns[kind]):
            raise DataError(
                f"the messages show {num_asked[kind]} {kind}s of the column {key!r}, which has "
                f"{len(columns[kind])}",
                expected=f"one <{kind}> in the texts for each",
            )
    return [_without_sources(message) for message in messages], found


def source_of_part(part: ContentPart) -> tuple[MediaKind, Any] | None:
    """Return the kind of an image or a video, and its source (None: it is elsewhere).

    None for a part of another type.
    """
    kind = _PART_KINDS.get(part.type)
    return None if kind is None else (kind, (part.model_extra or {}).get(part.type))


def with_media_columns(row: Row) -> Row:
    """Return a row of a batch, with the images and videos of its `multi_modal_data` as columns."""
    media = row.get("multi_modal_data")
    if not isinstance(media, Mapping):
        return row
    given = cast("Mapping[str, Any]", media)
    columns = {f"{kind}s": given.get(str(kind)) for kind in MediaKind}
    rest = {name: value for name, value in row.items() if name != "multi_modal_data"}
    return {name: value for name, value in columns.items() if value} | rest


def _sources(value: Any) -> list[Any]:
    """Return the images or videos of a column: a list, or one of them."""
    value = _decoded(value)
    if isinstance(value, np.ndarray):
        value = cast("np.ndarray[Any, Any]", value)
        value = value.tolist() if value.dtype == object else value
    if isinstance(value, list | tuple):
        return [one for one in cast("Sequence[Any]", value) if one is not None]
    return [] if value is None else [value]


def _split_marks(message: Message, kinds: Set[MediaKind]) -> Message:
    """Split the texts of a message at `<image>` and `<video>`, for columns that the row has."""
    texts = message.parts or [ContentPart(type="text", text=message.text)]
    if message.role == "assistant" or not any(
        f"<{k}>" in (p.text or "") for k in kinds for p in texts
    ):
        return message
    parts: list[ContentPart] = []
    for part in texts:
        if part.type != "text":
            parts.append(part)
            continue
        start, text = 0, part.text or ""
        for mark in _MARKS.finditer(text):
            kind = MediaKind(mark.group()[1:-1])
            if kind in kinds:
                parts.append(ContentPart(type="text", text=text[start : mark.start()]))
                parts.append(ContentPart(type=str(kind)))
                start = mark.end()
        parts.append(ContentPart(type="text", text=text[start:]))
    kept = [part for part in parts if part.type != "text" or part.text]
    return message.model_copy(update={"content": kept})


def _without_sources(message: Message) -> Message:
    """Return a message in which parts that show an image or a video have only their kind."""
    shown = [source_of_part(part) for part in message.parts]
    if not any(shown):
        return message
    content = [
        ContentPart(type=str(found[0])) if found else part
        for found, part in zip(shown, message.parts, strict=True)
    ]
    return message.model_copy(update={"content": content})


def without_nulls(value: Any) -> Any:
    """Drop nulls from mappings, at any depth. A mapping that has only nulls becomes None.

    Example:
        >>> without_nulls({"a": {"x": 1, "y": None}, "b": {"x": None}, "c": {}})
        {'a': {'x': 1}, 'c': {}}
    """
    if isinstance(value, np.ndarray | np.generic):
        return without_nulls(value.tolist())
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in cast("Sequence[Any]", value)]
    if not isinstance(value, Mapping) or not value:
        return cast("Any", value)
    items = cast("Mapping[Any, Any]", value).items()
    kept = {name: without_nulls(item) for name, item in items}
    return {name: item for name, item in kept.items() if item is not None} or None


def _decoded(value: Any) -> Any:
    """Decode a JSON text; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _describe(error: ValidationError, prompt_key: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key.replace('messages', prompt_key, 1)}: {first['msg']} ({_shown(first['input'])})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Conversation(BaseModel):
    """A whole conversation, for the supervised warm-up and for the tokenizer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    messages: list[Message] = Field(min_length=1)
    tools: list[OpenAIFunctionToolSchema] | None = None
    """The tools of the conversation; None: those of the run."""
    multi_modal_data: dict[str, list[Any]] = Field(default_factory=dict[str, list[Any]])
    """Sources of its images and videos by kind, as in a `Prompt`."""

    @property
    def tools_called(self) -> list[str]:
        """Names of the tools that the assistant calls, in order."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        return [call.function.name for call in calls]


def load_conversations(file: str | Path, *, max_rows: int | None = None) -> list[Conversation]:
    """Read a Parquet, JSON or JSONL file of conversations.

    Each row has `messages` (a list, or its JSON) and may have `tools`, `images` and `videos`. Other
    columns are not read.

    Args:
        file: The file.
        max_rows: Return only the first rows, and check only these; None: all.

    Raises:
        DataError: With file, row number (from 0) and what was expected.
    """
    rows = read_rows(file, max_rows=max_rows)
    return [_conversation(row, file, number) for number, row in enumerate(rows)]


def _conversation(row: Row, file: str | Path, number: int) -> Conversation:
    keys = {kind: f"{kind}s" for kind in MediaKind}
    try:
        read = Conversation.model_validate(
            {name: _decoded(without_nulls(row.get(name))) for name in ("messages", "tools")}
        )
        media = {key: row[key] for key in keys.values() if row.get(key) is not None}
        placed = place_media(read.messages, media, keys)
        if placed is None:
            return read
        return read.model_copy(update={"messages": placed[0], "multi_modal_data": placed[1]})
    except DataError as error:
        error.details |= {"file": file, "row": number}
        raise
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{key}: {first['msg']}",
            file=file,
            row=number,
            expected="`messages`: a list of messages with role and content; optional: `tools`",
        ) from None
