"""The base class of the bundled tools: their schema, their own keys, checks of config and calls."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError, ToolError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.call import ExecutionMode
from agentrl.plugins.keys import read_keys
from agentrl.tools.base import BaseTool
from agentrl.tools.runtime.settings import SHARED_KEYS, ToolSettings


class NoKeys(Section):
    """The own keys of a tool that has none."""


class BundledTool(BaseTool):
    """A tool that checks its `config`, and has a schema that a YAML need not repeat.

    Raises:
        ConfigError: for an unknown or invalid key, or an `isolation` that is refused.
    """

    keys_class: type[Any] = NoKeys
    """The tool's own keys. A subclass that has more keys replaces it."""
    default_schema: ClassVar[OpenAIFunctionToolSchema | None] = None
    """Used if the YAML has no `tool_schema`."""
    why_inline: ClassVar[str] = ""
    """Why another `isolation` than `none` is refused; empty: it is not."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._keys: Any = read_keys(self.keys_class, config, key="config", also_known=SHARED_KEYS)
        if self.why_inline:
            refuse_isolation(config, because=self.why_inline)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the YAML's schema, else the bundled one."""
        return self.tool_schema or self.default_schema or super().get_openai_tool_schema()


def function_schema(
    name: str, description: str, **parameters: dict[str, Any]
) -> OpenAIFunctionToolSchema:
    """Make the schema of a function; all its parameters are required.

    Args:
        name: Of the function.
        description: Shown to the model.
        **parameters: The JSON Schema of each parameter.
    """
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def string_parameter(description: str) -> dict[str, Any]:
    """Make the JSON Schema of a parameter that is a text."""
    return {"type": "string", "description": description}


def refuse_isolation(config: Mapping[str, Any], *, because: str) -> None:
    """Check that a tool runs on the event loop, where its connections and sessions are.

    Args:
        config: The tool's `config`.
        because: Why another mode has no advantage.

    Raises:
        ConfigError: for `isolation: thread` or `process`.
    """
    isolation = ToolSettings.check(config).isolation
    if isolation is not ExecutionMode.INLINE:
        raise ConfigError(
            f"isolation is {str(isolation)!r}: {because}",
            key="config.isolation",
            expected="none, or no such key",
        )


def refuse_unsendable(arguments: Mapping[str, Any]) -> None:
    r"""Check that arguments can be sent to a service as JSON.

    Python's JSON reader accepts lone surrogates (`"\ud800"`), NaN and infinities, and other readers
    do not. A client library may close its connection because of them, which fails other calls too.

    Raises:
        ToolError: if they cannot be sent.
    """
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise ToolError(
            "Error: the arguments are not valid JSON: NaN, Infinity, or half a character"
        ) from None
