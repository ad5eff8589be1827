"""Make a tool of a function: its schema is read from signature and docstring."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast, get_type_hints, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from agentrl.errors import ConfigError, ToolError
from agentrl.messages import OpenAIFunctionSchema, OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.call import call_method
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import ToolSettings

MARK = "__agentrl_function_tool__"
"""Attribute of a decorated function that holds its schema."""

CONFIG_MARK = "__agentrl_function_tool_config__"
"""Attribute of a decorated function that holds its `config`."""

F = TypeVar("F", bound=Callable[..., Any])


@overload
def function_tool(target: F) -> F: ...
@overload
def function_tool(
    target: str | None = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Callable[[F], F]: ...
def function_tool(
    target: Any = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Any:
    """Mark a function as a tool; written `@function_tool`, with a name, or with keywords.

    The function itself is left as it is, to be called and tested. What it may return is what
    `BaseTool.execute` may, or any other JSON value or pydantic model. A plain `def` runs off the
    event loop.

    Args:
        target: The function, or the tool's name (default: the function's).
        schema: Told to the model as it is, in place of the one read from the function.
        config: What a tool YAML's `config` would say: `timeout_s`, `cache`, ... (`ToolSettings`).

    Raises:
        ConfigError: for a signature that no JSON Schema can describe, and a `config` that cannot
            be meant.

    Example:
        >>> @function_tool
        ... def add(a: int, b: int = 1) -> str:
        ...     '''Add two numbers.'''
        ...     return str(a + b)
        >>> FunctionTool(add).tool_schema.function.description
        'Add two numbers.'
    """
    if callable(target):
        return _mark(cast("Callable[..., Any]", target), None, schema, None)
    return partial(_mark, name=target, schema=schema, config=config)


class FunctionTool(BaseTool):
    """A decorated function as a tool: no state, no reward of its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | None = None,
    ) -> None:
        self.function = function
        told = vars(function)
        super().__init__(config or told.get(CONFIG_MARK) or {}, tool_schema or told[MARK])
        self._arguments = _arguments_model(function)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the function with the call's arguments, converted to what it declares.

        Raises:
            ToolError: for arguments that do not fit its annotations.
        """
        arguments = self._convert(parameters) | execute_kwargs
        value = await call_method(self.function, **arguments)
        return ToolResult.of(_shown(value), tool=self.name)

    def _convert(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(parameters)
        except ValidationError as error:
            raise ToolError(_first_problem(error)) from None
        names = {key: str(info.alias) for key, info in self._arguments.model_fields.items()}
        return {names[key]: getattr(checked, key) for key in checked.model_fields_set}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.config, self.tool_schema)


def schema_of(function: Callable[..., Any], name: str | None = None) -> OpenAIFunctionToolSchema:
    """Read a tool's schema from a function's signature and docstring.

    Raises:
        ConfigError: for `*args`, `**kwargs`, positional-only parameters, and annotations that
            have no JSON Schema.
    """
    model = _arguments_model(function)
    try:
        parameters = model.model_json_schema(schema_generator=_PlainSchema)
    except PydanticUserError as error:
        raise _unusable(function, str(error)) from error
    parameters.setdefault("properties", {})
    parameters.setdefault("required", [])
    docs = docstring_parser.parse(inspect.getdoc(function) or "")
    lines = [part for part in (docs.short_description, docs.long_description) if part]
    return OpenAIFunctionToolSchema(
        type="function",
        function=OpenAIFunctionSchema(
            name=name or function.__name__, description="\n\n".join(lines), parameters=parameters
        ),
    )


class _PlainSchema(GenerateJsonSchema):
    """JSON Schema without the titles that pydantic makes up from names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        whole = super().generate(schema, mode)
        for model in (whole, *whole.get("$defs", {}).values()):
            model.pop("title", None)
        return whole


def _mark(
    function: F,
    name: str | None,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None,
    config: dict[str, Any] | None,
) -> F:
    ToolSettings.check(config or {}, key=f"{function.__name__}.config")
    chosen = schema_of(function, name) if schema is None else _checked(schema)
    setattr(function, MARK, chosen)
    setattr(function, CONFIG_MARK, config)
    return function


def _checked(schema: OpenAIFunctionToolSchema | dict[str, Any]) -> OpenAIFunctionToolSchema:
    return OpenAIFunctionToolSchema.model_validate(schema)


def _arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Build the model of the arguments. Fields are numbered, so any parameter name will do."""
    docs = docstring_parser.parse(inspect.getdoc(function) or "")
    told = {entry.arg_name: entry.description for entry in docs.params}
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {
            f"argument_{place}": _field(function, parameter, hints, told.get(parameter.name))
            for place, parameter in enumerate(inspect.signature(function).parameters.values())
        }
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        return create_model("Arguments", __config__=config, **fields)
    except (NameError, PydanticUserError) as error:
        raise _unusable(function, str(error)) from error


def _field(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    hints: dict[str, Any],
    description: str | None,
) -> tuple[Any, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise _unusable(function, f"parameter {parameter} cannot be passed by name")
    default = ... if parameter.default is parameter.empty else parameter.default
    hint = hints.get(parameter.name, Any)
    # A description inside `Annotated[..., Field(description=...)]` wins over the docstring's.
    own = any(isinstance(m, FieldInfo) and m.description for m in getattr(hint, "__metadata__", ()))
    if own:
        return hint, Field(default, alias=parameter.name)
    return hint, Field(default, alias=parameter.name, description=description)


def _unusable(function: Callable[..., Any], why: str) -> ConfigError:
    return ConfigError(
        f"no tool can be made of the function {function.__name__!r}: {why}",
        expected="named parameters with annotations that have a JSON Schema, or schema=...",
    )


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"argument {place}: {first['msg']}"


def _shown(value: Any) -> Any:
    """Turn the JSON values that `ToolResult.of` does not take by itself into text."""
    if isinstance(value, BaseModel) and not isinstance(value, ToolResponse):
        return value.model_dump_json()
    if isinstance(value, bool | int | float | list):
        return ToolResponse.of(cast("dict[str, Any]", value))
    return value
