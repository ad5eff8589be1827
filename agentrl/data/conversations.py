"""Rows with `messages` -> conversations, for the supervised warm-up and the tokenizer."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.data.files import Row, read_rows
from agentrl.data.rows import without_nulls
from agentrl.errors import DataError
from agentrl.messages import Message, OpenAIFunctionToolSchema


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
            {name: _decoded(row.get(name)) for name in ("messages", "tools")}
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


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except ValueError:
        return value
