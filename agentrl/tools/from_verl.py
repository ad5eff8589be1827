"""Tools of verl's: which of ours stands for each, and what their keys are called here."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools.base import BaseTool

STAND_INS = (
    "verl.tools.gsm8k_tool.Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool",
    "verl.tools.mcp_base_tool.MCPBaseTool",
    "verl.tools.mcp_search_tool.MCPSearchTool",
    "verl.tools.search_tool.SearchTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool",
)
"""Class paths of verl's tools that `agentrl.compat` stands in for, with verl's texts."""

RENAMED_KEYS: Mapping[str, Mapping[str, str | None]] = {
    "agentrl.tools.mcp_tool.MCPTool": {"timeout": "timeout_s"},
    "agentrl.tools.search_tool.SearchTool": {
        "retrieval_service_url": "url",
        "topk": "top_k",
        "timeout": "timeout_s",
        "num_workers": "max_concurrency",
    },
    # There a limit of calls at work, as num_workers is; here one of calls in a second.
    "agentrl.compat.tools.SearchTool": {
        "rate_limit": None,
        "enable_global_rate_limit": None,
    },
}
"""Keys of `config` that have another name here, by the class that an entry names, is of, or derives
from; None: a key that has nothing to say here, and is dropped."""


def our_names(config: Mapping[str, Any], found: type[BaseTool]) -> dict[str, Any]:
    """Read verl's names of keys as ours.

    Args:
        config: Of an entry.
        found: Its class.

    Raises:
        ConfigError: for a key under both of its names.
    """
    names: dict[str, str | None] = {}
    for base in found.__mro__:
        names |= RENAMED_KEYS.get(f"{base.__module__}.{base.__qualname__}", {})
    ours: dict[str, Any] = {}
    for name, value in config.items():
        new_name = names.get(name, name)
        if new_name != name and new_name in config:
            raise ConfigError(
                f"{name} and {new_name} say the same thing",
                key=f"config.{name}",
                expected=f"{new_name} alone",
            )
        if new_name is not None:
            ours[new_name] = value
    return ours


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
