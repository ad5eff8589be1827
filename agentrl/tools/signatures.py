"""Call constructors and `create` methods of users with the arguments that they accept.

Tools that were written for verl differ: some constructors accept only `config`. `create` gets the
row's `create_kwargs` as one mapping, as in verl's agent loops, or as keywords, as in its request
loop.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.call import check_takes
from agentrl.tools.base import BaseTool, construct

_WHOLE = "create_kwargs"
_EXECUTE = "a method execute(self, instance_id, parameters, **kwargs)"


T = TypeVar("T", bound=BaseTool)


def build_tool(
    found: type[T], config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
) -> T:
    """Build a tool, with the arguments that its constructor accepts.

    Raises:
        ConfigError: if the constructor does not accept the YAML's schema, does not call the one of
            `BaseTool`, or gives the tool another name than its schema has.
    """
    try:
        tool = construct(found, config, tool_schema)
    except AttributeError as error:
        if isinstance(error.obj, found) and error.name in ("config", "tool_schema", "name"):
            raise _not_initialized(found) from error
        raise
    if not (hasattr(tool, "config") and hasattr(tool, "tool_schema")):
        raise _not_initialized(found)
    shown = tool.tool_schema.name
    if tool.name != shown:
        raise ConfigError(
            f"{found.__name__} names itself {tool.name!r}, and its schema says {shown!r}",
            expected="one name: the model calls the tool by the name in its schema",
        )
    if getattr(tool.execute, "__func__", None) is BaseTool.execute:
        raise ConfigError(f"{found.__name__} has no execute", expected=_EXECUTE)
    check_takes(tool.execute, ["instance_id", "parameters"], is_partial=True)
    for method in (tool.create, tool.calc_reward, tool.release):
        check_takes(method, ["instance_id"], is_partial=True)
    return tool


def create_arguments(
    create: Callable[..., Any], create_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords for a tool's `create`.

    A `create` with a parameter `create_kwargs` gets the row's whole mapping, and by name those of
    its entries that have a parameter. If it has `**kwargs` and its code reads "create_kwargs", it
    gets the mapping and all entries. Every other `create` gets the entries as keywords.

    Args:
        create: The tool's method.
        create_kwargs: The row's `create_kwargs`.
    """
    parameters = inspect.signature(create).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    whole = parameters.get(_WHOLE)
    if whole is not None and whole.kind is not whole.VAR_KEYWORD:
        by_name = {key: value for key, value in create_kwargs.items() if key in parameters}
        return {**by_name, _WHOLE: dict(create_kwargs)}
    if takes_any:
        code = getattr(inspect.unwrap(create), "__code__", None)
        # True for `kwargs.get("create_kwargs")`.
        if code is not None and _WHOLE in code.co_consts:
            return {**create_kwargs, _WHOLE: dict(create_kwargs)}
    return dict(create_kwargs)


def named_arguments(create: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered arguments for which a tool's `create` has a parameter."""
    if not offered:
        return {}
    parameters = inspect.signature(create).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _not_initialized(found: type[BaseTool]) -> ConfigError:
    return ConfigError(
        f"the constructor of {found.__name__} does not call super().__init__ before it returns "
        "or reads config, tool_schema or name",
        expected="super().__init__(config, tool_schema) as its first line",
    )
