"""Names that tools written for verl import, and tool schemas as verl shows them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from agentrl.messages import OpenAIFunctionToolSchema

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


def as_verl_shows(
    schema: OpenAIFunctionToolSchema, style: Literal["verl_sync", "verl_async"]
) -> OpenAIFunctionToolSchema:
    """Return a tool's schema as verl 0.6.1 shows it to the policy.

    verl keeps type, description and enum of each parameter. Its request loop (`sync`) writes what
    is absent as null, and `strict`; its agent loops (`async`) leave it out.

    Args:
        schema: As the YAML or the server has it.
        style: By verl's `rollout.mode`.
    """
    function, has_nulls = schema.function, style == "verl_sync"
    given = cast("dict[str, dict[str, Any]]", function.parameters.get("properties") or {})
    parameters: dict[str, Any] = {
        "type": function.parameters.get("type", "object"),
        "properties": {name: _shown(one, has_nulls) for name, one in given.items()},
        "required": list(function.parameters.get("required") or []),
    }
    shown: dict[str, Any] = {
        "name": function.name,
        "description": function.description,
        "parameters": parameters,
    }
    if has_nulls or function.strict is not None:
        shown["strict"] = bool(function.strict)
    return OpenAIFunctionToolSchema.model_validate({"type": schema.type, "function": shown})


def _shown(parameter: Mapping[str, Any], has_nulls: bool) -> dict[str, Any]:
    known = {key: parameter.get(key) for key in ("type", "description", "enum")}
    return {key: value for key, value in known.items() if has_nulls or value is not None}


def rollout_trace_op(method: F) -> F:
    """Leave a method as it is: every call of a tool is recorded on its request anyway."""
    return method
