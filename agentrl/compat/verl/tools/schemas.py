"""`verl.tools.schemas`: records of tools and their calls."""

import json
from typing import Any, Literal

from pydantic import BaseModel

from agentrl.messages import OpenAIFunctionSchema, OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.from_verl import OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema

__all__ = [
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
]


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a parser of verl's finds it."""

    name: str
    arguments: str
    """JSON."""


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments decoded."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """Decode a call. Returns it, and whether its arguments were no JSON object."""
        try:
            arguments: Any = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_broken = not isinstance(arguments, dict)
        given: dict[str, Any] = {} if is_broken else arguments
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=given), is_broken


class OpenAIFunctionToolCall(BaseModel):
    """A call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema
