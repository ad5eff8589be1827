"""A row of a dataset as the rest of the data's way sees it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.config.schema.run import DataConfig
from agentrl.data.files import Row, read_rows
from agentrl.errors import DataError
from agentrl.messages import Message, OpenAIFunctionToolSchema


class Prompt(BaseModel):
    """What one row asks for: a conversation to continue, its plug-ins' settings, its truth.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "data_source": "sums"}
        >>> Prompt(index=0, messages=row["prompt"], data_source=row["data_source"]).index
        0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    index: int
    """Place of the row in its files, before any shuffling."""
    messages: list[Message] = Field(min_length=1)
    data_source: str = "unknown"
    """Which scorer applies."""
    ground_truth: Any = None
    """From the row's `reward_model.ground_truth`."""
    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row's `extra_info`, whole."""
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """From `extra_info.tools_kwargs`."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """From `extra_info.interaction_kwargs`."""
    tool_selection: list[str] | None = None
    """From `extra_info.tool_selection`: names of tools; None: as
    `rollout.multi_turn.tools_per_row` says."""
    columns: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row's further columns (`ability`, `agent_name`, ...)."""


_MESSAGES = "a list of messages, each with `role` and `content`, or a text"
_MEDIA_MARKS = ("<image>", "<video>")
_TEXT = "rows of text; data.image_key and data.video_key name the columns that are looked at"

_OF_EXTRA_INFO = ("tools_kwargs", "interaction_kwargs", "tool_selection", "need_tools_kwargs")


class RowReader:
    """Reads the rows of one file.

    Args:
        file: Named in errors.
        config: Which column holds what, and whether rows are held to what they ask for.
    """

    def __init__(self, file: str | Path, config: DataConfig | None = None) -> None:
        self._file = str(file)
        self._config = config or DataConfig()
        self._prompt_key = self._config.prompt_key
        self._reward_fn_key = self._config.reward_fn_key

    def read(self, row: Row, number: int, index: int) -> Prompt:
        """Read one row.

        Args:
            row: The columns, as the file has them.
            number: Place in the file, from 0: named in errors.
            index: Place over all files.

        Raises:
            DataError: with file, row number and what was expected.
        """
        given: Row = without_nulls(row) or {}
        messages = self._messages(given, number)
        extra_info = self._mapping(given.get("extra_info"), "extra_info", number)
        try:
            prompt = self._prompt(given, messages, extra_info, number, index)
        except ValidationError as error:
            raise self._error(_words(error, self._prompt_key), number, _MESSAGES) from None
        if media := self._media(row, prompt):
            reason = f"{media}: agentrl trains on text alone, and the policy would not see it"
            raise self._error(reason, number, _TEXT)
        return prompt

    def _media(self, row: Row, prompt: Prompt) -> str | None:
        """Say where a row has an image or a video; None for a row of text."""
        for key in (self._config.image_key, self._config.video_key):
            value = row.get(key)
            if without_nulls(_decoded(value) if isinstance(value, str) else value):
                return f"the column {key!r} has images or videos"
        has_columns = self._config.image_key in row or self._config.video_key in row
        for place, message in enumerate(prompt.messages):
            name = f"{self._prompt_key}[{place}]"
            if kinds := [kind for kind in message.part_types if kind != "text"]:
                return f"{name} has a content part of type {kinds[0]!r}"
            marks = [mark for mark in _MEDIA_MARKS if mark in message.text]
            if has_columns and marks:
                return f"{name} has the mark {marks[0]}, and the row a column for it"
        return None

    def _prompt(
        self, row: Row, messages: list[Any], extra_info: Row, number: int, index: int
    ) -> Prompt:
        reward_model = self._mapping(row.get("reward_model"), "reward_model", number)
        tools_kwargs = self._mapping(extra_info.get("tools_kwargs"), "tools_kwargs", number)
        needs = self._config.strict_rows and extra_info.get("need_tools_kwargs")
        if needs and not tools_kwargs:
            reason = "extra_info.need_tools_kwargs is true, and there are no tools_kwargs"
            raise self._error(
                reason, number, "extra_info.tools_kwargs: {tool: {create_kwargs: ...}}"
            )
        for name in _OF_EXTRA_INFO:
            if row.get(name) and not extra_info.get(name):
                reason = f"{name!r} is a column of its own, and is not read there"
                raise self._error(reason, number, f"extra_info.{name}")
        named = {self._prompt_key, self._reward_fn_key, "reward_model", "extra_info"}
        return Prompt(
            index=index,
            messages=messages,
            data_source=str(row.get(self._reward_fn_key, "unknown")),
            ground_truth=reward_model.get("ground_truth"),
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
            return _decoded_list(found) or [{"role": "user", "content": found}]
        if not isinstance(found, list) or not found:
            reason = f"{self._prompt_key!r} is {_shown(row[self._prompt_key])}"
            raise self._error(reason, number, _MESSAGES)
        return cast("list[Any]", found)

    def _mapping(self, value: Any, name: str, number: int) -> Row:
        found = _decoded(value) if isinstance(value, str) else value
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._error(f"{name} is {_shown(value)}", number, "a mapping, or one as JSON")
        return cast("Row", found)

    def _error(self, reason: str, number: int, expected: str) -> DataError:
        return DataError(reason, file=self._file, row=number, expected=expected)


def without_nulls(value: Any) -> Any:
    """Drop nulls from mappings, at any depth; what was nothing but nulls becomes None.

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


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _decoded_list(text: str) -> list[Any] | None:
    # A plain question may start with "[": only a list of mappings is a conversation.
    found = _decoded(text) if text.lstrip().startswith("[") else None
    messages = cast("list[Any]", found) if isinstance(found, list) else []
    return messages if all(isinstance(message, dict) for message in messages) else None


def _words(error: ValidationError, prompt_key: str) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place.replace('messages', prompt_key, 1)}: {first['msg']} ({_shown(first['input'])})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Conversation(BaseModel):
    """A whole conversation, as somebody else has led it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    messages: list[Message] = Field(min_length=1)
    tools: list[OpenAIFunctionToolSchema] | None = None
    """The tools that it was shown; None: those of the run."""

    @property
    def tools_called(self) -> list[str]:
        """Names of the tools that the assistant calls, in order."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        return [call.function.name for call in calls]


def load_conversations(file: str | Path) -> list[Conversation]:
    """Read a Parquet, JSON or JSONL file of conversations.

    Each row has `messages` (a list, or its JSON) and may have `tools`; other columns are not read.

    Raises:
        DataError: with file, row number (from 0) and what was expected.
    """
    return [_conversation(row, file, number) for number, row in enumerate(read_rows(file))]


def _conversation(row: Row, file: str | Path, number: int) -> Conversation:
    try:
        return Conversation.model_validate(
            {name: _decode_column(row.get(name)) for name in ("messages", "tools")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{place}: {first['msg']}",
            file=file,
            row=number,
            expected="`messages`, a list of messages with role and content, and maybe `tools`",
        ) from None


def _decode_column(value: Any) -> Any:
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except ValueError:
        return value
