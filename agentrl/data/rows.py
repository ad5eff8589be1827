"""Read the rows of a dataset as prompts or as conversations.

Arrow gives every struct of a column the same keys, and fills missing values with nulls. So in every
format a null counts as absent, and so does a mapping that has only nulls. Columns whose structure
varies may also be JSON texts. They are decoded, and their nulls are kept.
"""

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


_MESSAGES = "a list of messages, each with `role` and `content`, or a text"
_MEDIA_MARKS = ("<image>", "<video>")
_TEXT = "rows of text only (data.image_key and data.video_key name the columns that are checked)"

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
        given: Row = without_nulls(row) or {}
        messages = self._messages(given, number)
        extra_info = self._mapping(given.get("extra_info"), "extra_info", number)
        try:
            prompt = self._prompt(given, messages, extra_info, number, index)
        except ValidationError as error:
            raise self._error(_describe(error, self._prompt_key), number, _MESSAGES) from None
        if media := self._media(row, prompt):
            reason = f"{media}: agentrl trains on text only, so the policy would not see it"
            raise self._error(reason, number, _TEXT)
        return prompt

    def _media(self, row: Row, prompt: Prompt) -> str | None:
        """Describe the first image or video of a row; None for a row of text."""
        for key in (self._config.image_key, self._config.video_key):
            value = row.get(key)
            if without_nulls(_decoded(value)):
                return f"the column {key!r} has images or videos"
        has_columns = self._config.image_key in row or self._config.video_key in row
        for index, message in enumerate(prompt.messages):
            name = f"{self._prompt_key}[{index}]"
            if kinds := [kind for kind in message.part_types if kind != "text"]:
                return f"{name} has a content part of type {kinds[0]!r}"
            marks = [mark for mark in _MEDIA_MARKS if mark in message.text]
            if has_columns and marks:
                return f"{name} has the mark {marks[0]}, and the row has a column for it"
        return None

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

    @property
    def tools_called(self) -> list[str]:
        """Names of the tools that the assistant calls, in order."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        return [call.function.name for call in calls]


def load_conversations(file: str | Path, *, max_rows: int | None = None) -> list[Conversation]:
    """Read a Parquet, JSON or JSONL file of conversations.

    Each row has `messages` (a list, or its JSON) and may have `tools`. Other columns are not read.

    Args:
        file: The file.
        max_rows: Return only the first rows, and check only these; None: all.

    Raises:
        DataError: With file, row number (from 0) and what was expected.
    """
    rows = read_rows(file, max_rows=max_rows)
    return [_conversation(row, file, number) for number, row in enumerate(rows)]


def _conversation(row: Row, file: str | Path, number: int) -> Conversation:
    try:
        return Conversation.model_validate(
            {name: _decoded(without_nulls(row.get(name))) for name in ("messages", "tools")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{key}: {first['msg']}",
            file=file,
            row=number,
            expected="`messages`: a list of messages with role and content; optional: `tools`",
        ) from None
