"""Read a tool YAML, and a module of function tools, into checked tools."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.config.schema.resources import PluginResources
from agentrl.errors import AgentRLError, ConfigError, DataError, PluginError, find_nearest
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins import load_class, load_module
from agentrl.plugins.from_verl import (
    VERL_TOOLS,
    name_translated,
    our_names,
    translate,
    warn_of_dropped_keys,
)
from agentrl.plugins.keys import add_place, read_entries
from agentrl.tools.base import BaseTool
from agentrl.tools.delegate_tool import DelegateTool
from agentrl.tools.function_tool import MARK, FunctionTool
from agentrl.tools.mcp.hub import Hub
from agentrl.tools.mcp_tool import MCPTool, load_mcp_tools
from agentrl.tools.runtime.settings import ToolSettings, own_keys
from agentrl.tools.signatures import build_tool

logger = logging.getLogger(__name__)

_BASE = "agentrl.tools.BaseTool"
_OURS = "agentrl."
_NEAR = 0.65
"""Similarity from which a key may be a misspelled key of agentrl's, as `retries` for `retry`."""


def _refuse_number(value: Any) -> Any:
    if isinstance(value, int | float):
        raise ValueError(f"is {value!r}: expected a text, in quotes")
    return value


_Text = Annotated[Any, AfterValidator(_refuse_number)]
"""A text of a YAML, or what a later check refuses."""


class _ServerTexts(BaseModel):
    """The texts of a server; all else is checked when the servers are read."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    command: _Text = ""
    args: list[_Text] = []
    env: dict[str, _Text] = {}
    headers: dict[str, _Text] = {}


class _McpTexts(BaseModel):
    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    servers: dict[str, _ServerTexts] | None = None


class ToolEntry(BaseModel):
    """One tool of a tool YAML."""

    model_config = ConfigDict(extra="forbid")

    class_name: str = Field(description="the path of a BaseTool subclass, as package.module.Name")
    config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="a mapping, passed to the class"
    )
    tool_schema: OpenAIFunctionToolSchema | None = Field(
        default=None, description="a function schema as OpenAI writes it, or null"
    )
    resources: PluginResources = Field(
        default_factory=dict[str, float],
        description="a mapping of num_cpus, num_gpus and custom resources of Ray, more than 0",
    )
    mcp: _McpTexts | None = Field(
        default=None, description="for tools of MCP servers: a mapping that names the servers"
    )


def initialize_tools_from_config(path: str | Path) -> list[BaseTool]:
    """Build the tools that a YAML lists, in its order.

    Every class is loaded and checked before any tool is built.

    Raises:
        ConfigError: if the file cannot be read, for an invalid or unknown key, and for two tools of
            one name.
        PluginError: if a class path does not exist, or is not a `BaseTool`.
    """
    entries = read_entries(path, "tools", ToolEntry)
    for place, entry in enumerate(entries):
        _check_entry(entry, f"tools[{place}]", path)
    classes = [_class(entry, f"tools[{place}]", path) for place, entry in enumerate(entries)]
    hub = Hub()
    tools: list[BaseTool] = []
    for place, (found, entry) in enumerate(zip(classes, entries, strict=True)):
        built = _build(found, entry, hub, key=f"tools[{place}]", path=Path(path))
        for tool in built if entry.resources else ():
            tool.required_resources = entry.resources
        if entry.mcp is None:  # users cannot fix the schemas of a server
            refuse_undeclared(built, file=path, key=f"tools[{place}]")
        tools += built
    refuse_duplicates(tools, file=path)
    return tools


def classes_of_verl(path: str | Path) -> list[str]:
    """Return verl's classes in a tool YAML, each with the class that replaces it."""
    entries = read_entries(path, "tools", ToolEntry)
    return name_translated((entry.class_name for entry in entries), VERL_TOOLS)


def load_function_tools(path_or_module: str | Path) -> list[BaseTool]:
    """Make a tool of each function that `@function_tool` marks in a file or module.

    Raises:
        PluginError: if it cannot be imported.
        ConfigError: if it has no such function, or two of one name.
    """
    module = load_module(str(path_or_module))
    marked = {
        id(value): value
        for value in vars(module).values()
        if callable(value)
        and isinstance(getattr(value, "__dict__", {}).get(MARK), OpenAIFunctionToolSchema)
    }
    if not marked:
        raise ConfigError(
            "no function is marked as a tool", file=path_or_module, expected="@function_tool"
        )
    tools: list[BaseTool] = [FunctionTool(function) for function in marked.values()]
    refuse_duplicates(tools, file=path_or_module)
    return tools


def load_all_tools(
    tool_config_path: str | Path | None = None, function_tool_path: str | Path | None = None
) -> list[BaseTool]:
    """Load the tools of a YAML and of a module.

    Raises:
        ConfigError: as the two loaders, if both have a tool of the same name, and if a
            `DelegateTool` names a tool that the run does not have.
        PluginError: as the two loaders.
    """
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    if function_tool_path:
        tools = tools + load_function_tools(function_tool_path)
        refuse_duplicates(tools, file=function_tool_path)
    for tool in tools:
        if isinstance(tool, DelegateTool):
            tool.check_tools(tools)
    return tools


def select_tools(
    tools: Iterable[BaseTool],
    *,
    tool_selection: Iterable[str] | None = None,
    tools_kwargs: dict[str, Any] | None = None,
    per_row: Literal["all", "tools_kwargs"] = "all",
) -> list[BaseTool]:
    """Select the tools of one row: those of its `tool_selection`, else as `per_row` says.

    Args:
        tools: The run's tools.
        tool_selection: Names; None: as `per_row` says; an empty list selects none.
        tools_kwargs: The row's settings by tool name, checked against the run's tools. A null entry
            (Parquet fills in null for keys of other rows) is ignored. A run without tools ignores
            all of them.
        per_row: `rollout.multi_turn.tools_per_row`: every tool, or those named in `tools_kwargs`.

    Raises:
        DataError: for a name, in either of them, that no tool of the run has.
    """
    by_name = {tool.name: tool for tool in tools}
    given = [name for name, kwargs in (tools_kwargs or {}).items() if kwargs is not None]
    given = given if by_name else []
    of_run = given if per_row == "tools_kwargs" else list(by_name)
    wanted = of_run if tool_selection is None else list(dict.fromkeys(tool_selection))
    for key, names in (("tools_kwargs", given), ("tool_selection", wanted)):
        for name in names:
            if name not in by_name:
                raise DataError(
                    f"{key} names the tool {name!r}, which this run does not have",
                    key=f"extra_info.{key}",
                    expected=f"one of {', '.join(by_name) or 'none: the run has no tools'}",
                )
    return [by_name[name] for name in wanted]


def refuse_undeclared(
    tools: Iterable[BaseTool], *, file: str | Path | None = None, key: str | None = None
) -> None:
    """Check that the required parameters of tools are declared: else every call would be malformed.

    Raises:
        ConfigError: for the first parameter that is not.
    """
    for tool in tools:
        for name in tool.tool_schema.undeclared_required():
            declared = ", ".join(tool.tool_schema.function.parameters.get("properties") or {})
            raise ConfigError(
                f"the tool {tool.name!r} requires {name!r}, which is not one of its properties",
                file=file,
                key=f"{key}.tool_schema.function.parameters.required" if key else None,
                expected=f"some of {declared or 'none: it has no properties'}",
            )


def refuse_duplicates(tools: Iterable[BaseTool], *, file: str | Path | None = None) -> None:
    """Check that no two tools have the same name.

    Raises:
        ConfigError: naming the tool and both classes.
    """
    seen: dict[str, BaseTool] = {}
    for place, tool in enumerate(tools):
        first = seen.setdefault(tool.name, tool)
        if first is not tool:
            raise ConfigError(
                f"two tools have the name {tool.name!r}: a {type(first).__name__} and a "
                f"{type(tool).__name__}",
                file=file,
                key=f"tools[{place}]",
                expected="a name for each tool",
            )


def _check_entry(entry: ToolEntry, key: str, path: str | Path) -> None:
    kind = entry.config.get("type", "native")
    if kind not in ("native", "mcp"):
        raise ConfigError(
            f"unknown type {kind!r}", file=path, key=f"{key}.config.type", expected="native or mcp"
        )
    if kind == "mcp" and entry.mcp is None:
        raise ConfigError(
            "an entry of type mcp names no servers",
            file=path,
            key=f"{key}.mcp",
            expected="mcp: {mcp_servers_config_path: FILE} or mcp: {servers: {...}}",
        )
    if entry.resources and entry.mcp is not None:
        raise ConfigError(
            "the tools of this entry run on their MCP servers",
            file=path,
            key=f"{key}.resources",
            expected="no resources",
        )
    if entry.mcp is not None and entry.tool_schema is not None:
        raise ConfigError(
            "the entry has a tool_schema, but its MCP servers provide the schemas",
            file=path,
            key=f"{key}.tool_schema",
            expected="no tool_schema",
        )


def _class(entry: ToolEntry, key: str, path: str | Path) -> type[BaseTool]:
    try:
        class_path = translate(entry.class_name, VERL_TOOLS, base=_BASE)
        return load_class(class_path, BaseTool, file=path)
    except PluginError as error:
        details = {"file": path, **error.details, "key": f"{key}.class_name"}
        raise PluginError(str(error.args[0]), **details) from error


def _build(
    found: type[BaseTool], entry: ToolEntry, hub: Hub, *, key: str, path: Path
) -> list[BaseTool]:
    """Build the tools of an entry: one, or those of its MCP servers."""
    config, place = entry.config, f"{key}.config"
    try:
        shared = our_names(config, found)
        ToolSettings.of(found, shared, file=path, key=place)
        if entry.resources and issubclass(found, DelegateTool):
            raise ConfigError(
                "sub-agents run where their request runs", key="resources", expected="no resources"
            )
        warn_of_dropped_keys(config, found, file=path, key=place)
        if not found.__module__.startswith(_OURS):
            _warn_of_near_misses(shared, file=path, key=place)
            _warn_of_own_keys(found, config, file=path, key=place)
        if entry.mcp is None and not issubclass(found, MCPTool):
            return [build_tool(found, config, entry.tool_schema)]
        if entry.mcp is None:
            raise ConfigError(
                f"{found.__name__} has no server",
                expected="a section mcp next to config, which names a server",
            )
        if not issubclass(found, MCPTool):
            raise ConfigError(
                f"{entry.class_name} is no tool of MCP servers",
                key="mcp",
                expected="agentrl.tools.mcp_tool.MCPTool or a subclass of it, or no section mcp",
            )
        return load_mcp_tools(
            found, config, entry.mcp.model_dump(exclude_unset=True), hub=hub, file=path, key=key
        )
    except AgentRLError as error:
        add_place(error, file=path, key=key)
        raise
    except Exception as error:
        raise ConfigError(
            f"building {entry.class_name} raised {type(error).__name__}: {error}",
            file=path,
            key=key,
            expected="a config and a tool_schema that the class takes",
        ) from error


def _warn_of_near_misses(config: Mapping[str, Any], *, file: Path, key: str) -> None:
    """Warn of keys that may be misspelled keys of agentrl's. They may be the tool's own keys."""
    known = list(ToolSettings.model_fields)
    for name in config:
        near = find_nearest(name, known, cutoff=_NEAR)
        # A key that adds a word to one of agentrl's, as cache_dir, is not a misspelling.
        if near and name not in known and not name.startswith(f"{near}_"):
            logger.warning(
                "%s: %s.%s is not read by agentrl; did you mean %s?", file, key, name, near
            )


def _warn_of_own_keys(
    found: type[BaseTool], config: Mapping[str, Any], *, file: Path, key: str
) -> None:
    """Warn of keys that agentrl reads for other tools, and leaves to a tool written for verl."""
    for name in sorted(own_keys(found, config)):
        logger.warning(
            "%s: %s.%s: %r is left to the tool, as in verl; agentrl's own %s is a mapping",
            *(file, key, name, config[name], name),
        )
