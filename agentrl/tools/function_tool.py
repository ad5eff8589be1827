"""Make a tool of a function, with a schema from its signature and docstring."""

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
"""Attribute of a decorated function that contains its schema."""

CONFIG_MARK = "__agentrl_function_tool_config__"
"""Attribute of a decorated function that contains its `config`."""

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
    """Mark a function as a tool: `@function_tool`, also with a name or with keywords.

    The function itself does not change, and can be called and tested. It may return what
    `BaseTool.execute` may return, or any other JSON value or pydantic model. A plain `def` runs on
    a thread.

    Args:
        target: The function, or the tool's name (default: the function's).
        schema: Shown to the model unchanged, instead of the one read from the function.
        config: As the `config` of a tool YAML: `timeout_s`, `cache`, ... (`ToolSettings`).

    Raises:
        ConfigError: if no JSON Schema can describe the signature, or `config` is invalid.

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
    """A decorated function as a tool, without state and without a reward of its own."""

    def __init__(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | None = None,
    ) -> None:
        self.function = function
        marks = vars(function)
        super().__init__(config or marks.get(CONFIG_MARK) or {}, tool_schema or marks[MARK])
        self._arguments = _arguments_model(function)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the function with the call's arguments, converted to its annotations.

        Raises:
            ToolError: if the arguments do not fit the annotations.
        """
        arguments = self._convert(parameters) | execute_kwargs
        value = await call_method(self.function, **arguments)
        # Write the JSON values that `ToolResult.of` does not accept as text.
        if isinstance(value, BaseModel) and not isinstance(value, ToolResponse):
            value = value.model_dump_json()
        elif isinstance(value, bool | int | float | list):
            value = ToolResponse.of(cast("dict[str, Any]", value))
        return ToolResult.of(value, tool=self.name, made_by=self.function)

    def _convert(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(parameters)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ToolError(f"argument {where}: {first['msg']}") from None
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
    """JSON Schema without the titles that pydantic derives from names."""

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
    validate = OpenAIFunctionToolSchema.model_validate
    setattr(function, MARK, schema_of(function, name) if schema is None else validate(schema))
    setattr(function, CONFIG_MARK, config)
    return function


def _arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Build the model of the arguments. Fields are numbered, because not every name is allowed."""
    docs = docstring_parser.parse(inspect.getdoc(function) or "")
    descriptions = {entry.arg_name: entry.description for entry in docs.params}
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {
            f"argument_{i}": _field(function, parameter, hints, descriptions.get(parameter.name))
            for i, parameter in enumerate(inspect.signature(function).parameters.values())
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
    # A description in `Annotated[..., Field(description=...)]` replaces the docstring's.
    own = any(isinstance(m, FieldInfo) and m.description for m in getattr(hint, "__metadata__", ()))
    if own:
        return hint, Field(default, alias=parameter.name)
    return hint, Field(default, alias=parameter.name, description=description)


def _unusable(function: Callable[..., Any], why: str) -> ConfigError:
    return ConfigError(
        f"no tool can be made of the function {function.__name__!r}: {why}",
        expected="named parameters with annotations that have a JSON Schema, or schema=...",
    )
