"""Tools of MCP servers: whatever a server offers, the policy can call.

One entry of a tool YAML becomes one tool for each tool of its servers, with the schemas that the
servers give:

    tools:
      - class_name: agentrl.tools.mcp_tool.MCPTool
        config: {timeout_s: 60}
        mcp:
          mcp_servers_config_path: mcp_servers.json
          tool_selected_list: [echo, get-sum]
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError, ServiceError, ToolError, did_you_mean
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.environment import require_package
from agentrl.plugins.keys import read_keys
from agentrl.tools.arguments import refuse_unsendable
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.from_verl import our_names
from agentrl.tools.mcp.hub import Hub, Sessions
from agentrl.tools.mcp.servers import McpSection, Server, read_servers
from agentrl.tools.runtime.settings import SHARED_KEYS, refuse_isolation
from agentrl.tools.signatures import build_tool

if TYPE_CHECKING:
    from mcp_types import CallToolResult, Tool


Offer = tuple[Server, "Tool"]
"""A tool, and whose it is."""


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool where it really is."""

    name: str
    """As its server names it."""
    sessions: Sessions


class MCPTool(BaseTool):
    """Pass calls on to a tool of an MCP server, over stdio or streamable HTTP.

    `config` has the keys of every tool. `mcp` says where the servers are:

    * `mcp_servers_config_path`: a JSON file `{"mcpServers": {...}}`, looked for beside the YAML and
      then in the current folder; or `servers`: the same by name, in the YAML itself. A server is
      `{command, args, env, cwd}`, which is started, or `{url, headers}`.
    * `tool_selected_list`: names of the tools to take; all of them by default.
    * `session`: `shared` (default), one session for each server and run, opened by the first call;
      or `per_request`, opened in `create`, closed in `release`, for servers that keep state.
    * `prefix`: put before each name, `{server}` standing for the server's; empty by default.
    * `connect_timeout_s`: seconds for a server to start and to greet; 30 by default.

    Arguments reach the server, and its schema the model, as they are. A result that the server
    marks as an error is shown to the model (`ToolError`); a server that dies, or breaks the
    protocol, fails that call alone, and the next call opens another session.

    Args:
        config: The YAML's `config`, whole.
        tool_schema: What the server says of the tool.
    """

    remote: RemoteTool
    """Where the tool is; set by the loader."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(our_names(config, type(self)), tool_schema)

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Open the request's session, where it has one of its own."""
        instance_id = instance_id or uuid.uuid4().hex
        await self.remote.sessions.begin(instance_id, self.name)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the tool on its server.

        Raises:
            ToolError: what the server says of a call that failed, or of arguments that it refuses.
            ServiceError: where there is no server, or none that keeps to the protocol.
        """
        return ToolResult(read_result(await self.ask(instance_id, parameters)))

    async def ask(self, instance_id: str, parameters: dict[str, Any]) -> "CallToolResult":
        """Call the tool on its server, and return its answer as it is.

        Raises:
            ToolError: for arguments that cannot be sent.
            ServiceError: if there is no server, or none that keeps to the protocol.
        """
        refuse_unsendable(parameters)
        session = self.remote.sessions.of(instance_id)
        return await session.call(self.remote.name, parameters)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Close the request's session, where it has one of its own."""
        await self.remote.sessions.end(instance_id, self.name)

    async def shutdown(self) -> None:
        """Close the sessions, and end the servers that were started for them."""
        await self.remote.sessions.close()


class _NoKeys(Section):
    """What an MCP tool reads of its `config` itself: nothing."""


def load_mcp_tools(
    kind: type[MCPTool],
    config: dict[str, Any],
    mcp: Mapping[str, Any],
    *,
    hub: Hub,
    file: Path,
    key: str,
) -> list[BaseTool]:
    """Make a tool of each tool that an entry's servers have.

    Args:
        kind: The entry's class.
        config: Its `config`.
        mcp: Its `mcp`.
        hub: The servers of the file.
        file: The YAML.
        key: Of the entry.

    Raises:
        ConfigError: for a wrong key, a selected tool that no server has, two tools of one name, a
            server that gives no list of its tools.
        MissingExtraError: where the client library is not installed.
    """
    shared = our_names(config, kind)
    if kind.__module__.startswith("agentrl."):
        read_keys(_NoKeys, shared, key="config", also_known=SHARED_KEYS)
    refuse_isolation(shared, because="an MCP tool only waits for others, and blocks nothing")
    section = read_keys(McpSection, mcp, file=file, key=f"{key}.mcp")
    servers = read_servers(section, file=file, key=f"{key}.mcp")
    require_package("mcp", extra="mcp", what="an MCP tool")
    try:
        listed = hub.tools(servers)
    except ServiceError as error:
        raise ConfigError(
            f"no list of tools: {error.args[0]}",
            file=file,
            key=f"{key}.mcp",
            expected="a server that starts, and lists its tools",
            last_words=error.details.get("last_words"),
        ) from error
    _check_selected(section, listed, file=file, key=f"{key}.mcp")
    offers = _name(section, listed, file=file, key=f"{key}.mcp")
    tools: list[BaseTool] = []
    for name, (server, tool) in offers.items():
        made = build_tool(kind, dict(config), _schema(tool, name=name, server=server))
        made.remote = RemoteTool(tool.name, hub.sessions(server, section.session))
        tools.append(made)
    return tools


def _check_selected(
    section: McpSection, listed: Sequence[tuple[Server, list["Tool"]]], *, file: Path, key: str
) -> None:
    there = [tool.name for _, tools in listed for tool in tools]
    for name in section.tool_selected_list or ():
        if name not in there:
            raise ConfigError(
                f"no server has a tool {name!r}{did_you_mean(name, there)}",
                file=file,
                key=f"{key}.tool_selected_list",
                expected=f"some of {', '.join(there) or 'none: there is no tool'}",
            )


def _name(
    section: McpSection, listed: Sequence[tuple[Server, list["Tool"]]], *, file: Path, key: str
) -> dict[str, Offer]:
    """Choose the tools of an entry, by the names that the model is told."""
    offers: dict[str, Offer] = {}
    for server, tool in ((server, tool) for server, tools in listed for tool in tools):
        if tool.name not in (section.tool_selected_list or (tool.name,)):
            continue
        name = section.prefix.replace("{server}", server.name) + tool.name
        if name in offers:
            first = offers[name][0].name
            raise ConfigError(
                f"the servers {first!r} and {server.name!r} both have a tool {name!r}",
                file=file,
                key=f"{key}.prefix",
                expected="'{server}_', or an entry for each server with its tool_selected_list",
            )
        offers[name] = server, tool
    return offers


def _schema(tool: "Tool", *, name: str, server: Server) -> OpenAIFunctionToolSchema:
    """Tell the model of a tool: its parameters are what the server sent, key for key.

    Raises:
        ConfigError: for parameters that are no JSON Schema.
    """
    function = {
        "name": name,
        "description": tool.description or tool.title or "",
        "parameters": tool.input_schema,
    }
    try:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    except ValueError as error:
        raise ConfigError(
            f"MCP server {server.name!r}, tool {tool.name!r}: its parameters cannot be used: "
            f"{error}",
            expected="a JSON Schema, or a tool_selected_list without this tool",
        ) from None


def read_result(result: "CallToolResult") -> ToolResponse:
    """Read a result: texts in their order, pictures and films beside them, the rest named.

    A text is shown as it is, an embedded text behind its address. Pictures and films are kept as
    JSON can hold them: `{"type": "image", "mimeType": "image/png", "data": base64}`. Sounds, other
    data and links are named in the text, each in a line. Structured content is shown, as JSON,
    where there is no text: servers that speak of it repeat it there.

    Raises:
        ToolError: for a result that the server marks as an error, with its text.
    """
    texts: list[str] = []
    media: dict[str, list[Any]] = {"image": [], "video": []}
    for part in result.content:
        fields = part.model_dump(mode="json", by_alias=True, exclude_none=True)
        _read_part(fields, texts, media)
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "Error: the tool failed, and did not say why")
    return ToolResponse(text=text, image=media["image"] or None, video=media["video"] or None)


def _read_part(part: dict[str, Any], texts: list[str], media: dict[str, list[Any]]) -> None:
    match part:
        case {"type": "text", "text": str(text)}:
            texts.append(text)
        case {"type": "image" | "audio" as kind, "mimeType": str(mime), "data": str(data)}:
            _read_data(kind, mime, data, texts, media)
        case {"type": "resource", "resource": {"text": str(text), "uri": uri}}:
            texts.append(f"[{uri}]\n{text}")
        case {"type": "resource", "resource": {"blob": str(data), "uri": uri, **rest}}:
            mime = str(rest.get("mimeType", "application/octet-stream"))
            _read_data(str(uri), mime, data, texts, media)
        case {"type": "resource_link", "uri": uri, "name": name, **rest}:
            about = f": {rest['description']}" if "description" in rest else ""
            texts.append(f"[link to {name}, {uri}{about}]")
        case _:
            texts.append(json.dumps(part, ensure_ascii=False))


def _read_data(
    name: str, mime: str, data: str, texts: list[str], media: dict[str, list[Any]]
) -> None:
    kind = mime.partition("/")[0]
    if kind in media:
        media[kind].append({"type": kind, "mimeType": mime, "data": data})
    else:
        texts.append(f"[{name}: {mime}, {len(data) * 3 // 4} bytes, not shown]")
