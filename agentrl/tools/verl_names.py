"""Names that tools written for verl import beside the base class.

A schema is any JSON Schema here, so these records do no more than spell one.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

F = TypeVar("F", bound=Callable[..., Any])


class OpenAIFunctionPropertySchema(BaseModel):
    """The JSON Schema of one parameter; keywords that it does not name are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The JSON Schema of all parameters; keywords that it does not name are kept."""

    model_config = ConfigDict(extra="allow")

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str]


def rollout_trace_op(method: F) -> F:
    """Leave a method as it is: every call of a tool is recorded on its request anyway."""
    return method
