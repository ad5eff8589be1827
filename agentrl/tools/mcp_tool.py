"""Tools of MCP servers: the policy can call what a server offers.

One entry of a tool YAML becomes one tool for each tool of its servers, with the schemas that the
servers give:

    tools:
      - class_name: agentrl.tools.mcp_tool.MCPTool
        config: {timeout_s: 60}
        mcp:
          mcp_servers_config_path: mcp_servers.json
          tool_selected_list: [echo, get-sum]
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, ServiceError, ToolError, did_you_mean
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse, dump_json
from agentrl.plugins.environment import require_package
from agentrl.plugins.from_verl import our_names
from agentrl.plugins.keys import read_keys
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.bundled import NoKeys, refuse_isolation, refuse_unsendable
from agentrl.tools.mcp.hub import Hub, Sessions
from agentrl.tools.mcp.servers import McpSection, Server, read_servers
from agentrl.tools.runtime.settings import SHARED_KEYS
from agentrl.tools.signatures import build_tool

if TYPE_CHECKING:
    from mcp_types import CallToolResult, Tool


class MCPTool(BaseTool):
    """Pass calls on to a tool of an MCP server, over stdio or streamable HTTP.

    `config` has the keys of every tool. `mcp` names the servers:

    * `mcp_servers_config_path`: a JSON file `{"mcpServers": {...}}`, in the folder of the YAML or
      in the current folder; or `servers`: the same by name, in the YAML itself. A server is
      `{command, args, env, cwd}`, which is started, or `{url, headers}`.
    * `tool_selected_list`: names of the tools to take; all of them by default.
    * `session`: `shared` (default), one session for each server and run, opened by the first call;
      or `per_request`, opened in `create`, closed in `release`, for servers that keep state.
    * `prefix`: put before each name; `{server}` in it is the server's name; empty by default.
    * `connect_timeout_s`: seconds for a server to start and to answer; 30 by default.

    Arguments reach the server, and its schema the model, unchanged. A result that the server marks
    as an error is shown to the model (`ToolError`). A server that dies, or breaks the protocol,
    fails that call alone, and the next call opens another session.

    Args:
        config: The complete `config` of the YAML.
        tool_schema: The server's schema of the tool.
    """

    remote_name: str
    """The tool's name on its server; set by the loader."""
    sessions: Sessions
    """The sessions with its server; set by the loader."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(our_names(config, type(self)), tool_schema)

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Open the request's session, if it has its own."""
        instance_id = instance_id or uuid.uuid4().hex
        await self.sessions.begin(instance_id, self.name)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the tool on its server.

        Raises:
            ToolError: if the call failed on the server, or the server refuses the arguments.
            ServiceError: if there is no server, or it breaks the protocol.
        """
        return ToolResult(read_result(await self.ask(instance_id, parameters)))

    async def ask(self, instance_id: str, parameters: dict[str, Any]) -> "CallToolResult":
        """Call the tool on its server, and return its answer unchanged.

        Raises:
            ToolError: for arguments that cannot be sent.
            ServiceError: if there is no server, or it breaks the protocol.
        """
        refuse_unsendable(parameters)
        return await self.sessions.of(instance_id).call(self.remote_name, parameters)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Close the request's session, if it has its own."""
        await self.sessions.end(instance_id, self.name)

    async def shutdown(self) -> None:
        """Close the sessions, and end the servers that were started for them."""
        await self.sessions.close()


def load_mcp_tools(
    kind: type[MCPTool],
    config: dict[str, Any],
    mcp: Mapping[str, Any],
    *,
    hub: Hub,
    file: Path,
    key: str,
) -> list[BaseTool]:
    """Make one tool for each tool that an entry's servers have.

    Args:
        kind: The entry's class.
        config: Its `config`.
        mcp: Its `mcp`.
        hub: The servers of the YAML.
        file: The YAML.
        key: Key of the entry.

    Raises:
        ConfigError: for an invalid key, a selected tool that no server has, two tools of one name,
            and a server that returns no list of its tools.
        MissingExtraError: if the client library is not installed.
    """
    shared = our_names(config, kind)
    if kind.__module__.startswith("agentrl."):
        read_keys(NoKeys, shared, key="config", also_known=SHARED_KEYS)
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
    tools: list[BaseTool] = []
    for name, (server, tool) in _select(section, listed, file=file, key=f"{key}.mcp").items():
        made = build_tool(kind, dict(config), _schema(tool, name=name, server=server))
        made.remote_name = tool.name
        made.sessions = hub.sessions(server, section.session)
        tools.append(made)
    return tools


def _select(
    section: McpSection, listed: Sequence[tuple[Server, list["Tool"]]], *, file: Path, key: str
) -> dict[str, tuple[Server, "Tool"]]:
    """Select the tools of an entry, by the names that the model sees."""
    known = [tool.name for _, tools in listed for tool in tools]
    for name in section.tool_selected_list or ():
        if name not in known:
            raise ConfigError(
                f"no server has a tool {name!r}{did_you_mean(name, known)}",
                file=file,
                key=f"{key}.tool_selected_list",
                expected=f"some of {', '.join(known) or 'none: there is no tool'}",
            )
    found: dict[str, tuple[Server, Tool]] = {}
    for server, tool in ((server, tool) for server, tools in listed for tool in tools):
        if tool.name not in (section.tool_selected_list or (tool.name,)):
            continue
        name = section.prefix.replace("{server}", server.name) + tool.name
        if name in found:
            first = found[name][0].name
            raise ConfigError(
                f"the servers {first!r} and {server.name!r} both have a tool {name!r}",
                file=file,
                key=f"{key}.prefix",
                expected="'{server}_', or an entry for each server with its tool_selected_list",
            )
        found[name] = server, tool
    return found


def _schema(tool: "Tool", *, name: str, server: Server) -> OpenAIFunctionToolSchema:
    """Make the schema of a tool; its parameters are exactly what the server sent.

    Raises:
        ConfigError: if the parameters are not a JSON Schema.
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
    """Read a result: texts in their order, images and videos apart, the rest named in the text.

    A text is shown unchanged, an embedded text after its address. Images and videos are kept as
    JSON values: `{"type": "image", "mimeType": "image/png", "data": base64}`. Audio, other data and
    links are named in the text, each in a line. Structured content is shown, as JSON, if no text
    part has words: servers that send it repeat it in a text part.

    Raises:
        ToolError: if the server marks the result as an error, with its text.
    """
    texts: list[str] = []
    has_words = False
    media: dict[str, list[Any]] = {"image": [], "video": []}

    def add_data(name: str, mime: str, data: str) -> None:
        kind = mime.partition("/")[0]
        if kind in media:
            media[kind].append({"type": kind, "mimeType": mime, "data": data})
        else:
            texts.append(f"[{name}: {mime}, {len(data) * 3 // 4} bytes, not shown]")

    for part in result.content:
        match fields := part.model_dump(mode="json", by_alias=True, exclude_none=True):
            case {"type": "text", "text": str(text)}:
                has_words = has_words or bool(text.strip())
                texts.append(text)
            case {"type": "image" | "audio" as kind, "mimeType": str(mime), "data": str(data)}:
                add_data(kind, mime, data)
            case {"type": "resource", "resource": {"text": str(text), "uri": uri}}:
                texts.append(f"[{uri}]\n{text}")
            case {"type": "resource", "resource": {"blob": str(data), "uri": uri, **rest}}:
                add_data(str(uri), str(rest.get("mimeType", "application/octet-stream")), data)
            case {"type": "resource_link", "uri": uri, "name": name, **rest}:
                about = f": {rest['description']}" if "description" in rest else ""
                texts.append(f"[link to {name}, {uri}{about}]")
            case _:
                texts.append(dump_json(fields))
    if not has_words and result.structured_content is not None:
        shown = dump_json(result.structured_content)
        texts = [*filter(str.strip, texts), shown]
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "Error: the tool failed, and gave no reason")
    return ToolResponse(text=text, image=media["image"] or None, video=media["video"] or None)
