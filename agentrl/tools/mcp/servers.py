"""Read the MCP servers of an entry: from the YAML, or from a file that other programs read too.

The file has the well-known form `{"mcpServers": {"name": {"command": ..., "args": [...]}}}`. In its
texts `${NAME}`, `${NAME:-default}` and `${oc.env:NAME}` are read from the environment, so that the
file needs no secrets. Keys that only other programs read are ignored. A server with
`"disabled": true` is left out.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from agentrl.clients.http import without_secrets
from agentrl.config.schema.section import Section, UserPath
from agentrl.errors import ConfigError
from agentrl.plugins.keys import read_keys

_VARIABLE = re.compile(r"\$\{(?:oc\.env:)?(\w+)(?:(?::-|,)([^}]*))?\}")
_FORM = 'an object {"mcpServers": {name: {"command", "args", "env"} or {"url", "headers"}}}'


class SessionScope(StrEnum):
    """How many sessions a server has; `mcp.session` of the YAML."""

    SHARED = "shared"
    """One session for the run, opened by the first call."""
    PER_REQUEST = "per_request"
    """One session for each request, from its first turn to its end. For servers with state."""


class StdioServer(Section):
    """A server that is started as a process, and connected over its standard streams."""

    command: str = Field(min_length=1)
    """The program to start: a name on the PATH, or a path."""
    args: tuple[str, ...] = ()
    """A list of its arguments."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables by name, in addition to HOME, PATH, USER and similar ones."""
    cwd: UserPath | None = None
    """The folder in which it is started; null: the current one."""


class HttpServer(Section):
    """A server that runs already, and is connected over streamable HTTP."""

    url: str = Field(pattern=r"^https?://")
    """An address that begins with http:// or https://."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers of every request, by name."""

    @property
    def shown_url(self) -> str:
        """The address without user, password and query, which may be secret."""
        return without_secrets(self.url)


ServerSpec = StdioServer | HttpServer


@dataclass(frozen=True, slots=True)
class Server:
    """One server of an entry."""

    name: str
    spec: ServerSpec
    connect_timeout_s: float

    @property
    def label(self) -> str:
        """Its name, and its address if it has one."""
        at = f" at {self.spec.shown_url}" if isinstance(self.spec, HttpServer) else ""
        return f"{self.name!r}{at}"

    @property
    def identity(self) -> str:
        """Equal for entries that name the same server; they share its sessions."""
        return json.dumps([self.name, self.connect_timeout_s, self.spec.model_dump(mode="json")])


class McpSection(Section):
    """The `mcp` section of a tool entry."""

    mcp_servers_config_path: UserPath | None = None
    """A JSON file of servers, in the folder of the YAML or in the current folder."""
    servers: dict[str, dict[str, Any]] | None = Field(default=None, repr=False)
    """Servers by name, instead of the file: {command, args, env, cwd} or {url, headers}."""
    tool_selected_list: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A list of names of the tools to take, as the servers name them; null: all of them."""
    session: SessionScope = SessionScope.SHARED
    """shared or per_request."""
    prefix: str = ""
    """A text before each tool's name, in which {server} is the server's name."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for a server to start and to answer, more than 0."""


def read_servers(section: McpSection, *, file: Path, key: str) -> list[Server]:
    """Read the servers that a section names.

    Args:
        section: From the YAML.
        file: The YAML; a relative path is searched in its folder first.
        key: Key of the section, for the errors.

    Raises:
        ConfigError: if both or none of the two ways to name servers are used, if the file cannot be
            read, for an unknown key, and for an environment variable that is not set.
    """
    if (section.servers is None) == (section.mcp_servers_config_path is None):
        raise ConfigError(
            f"{key} must name its servers in one way",
            file=file,
            key=key,
            expected="either mcp_servers_config_path or servers",
        )
    servers = section.servers
    if servers is None:
        file = _find_file(cast("Path", section.mcp_servers_config_path), file, key)
        servers, key = _read_file(file), "mcpServers"
    else:
        key = f"{key}.servers"
    if not servers:
        raise ConfigError("there is no server", file=file, key=key, expected="at least one")
    return [
        Server(name, _spec(values, file, f"{key}.{name}"), section.connect_timeout_s)
        for name, values in servers.items()
    ]


def _spec(values: Mapping[str, Any], file: Path, key: str) -> ServerSpec:
    if values.get("type") == "sse":
        raise ConfigError(
            "the SSE transport is not supported; streamable HTTP replaces it",
            file=file,
            key=f"{key}.type",
            expected="the server's address for streamable HTTP (often .../mcp)",
        )
    model = HttpServer if "url" in values else StdioServer
    return read_keys(model, values, key=key, file=file, also_known=("type",))


def _find_file(path: Path, yaml: Path, key: str) -> Path:
    for folder in (yaml.parent, Path.cwd()):
        if (folder / path).is_file():
            return folder / path
    raise ConfigError(
        f"no file {path}, neither in the folder of the YAML nor in {Path.cwd()}",
        file=yaml,
        key=f"{key}.mcp_servers_config_path",
        expected="a JSON file of MCP servers",
    )


def _read_file(file: Path) -> dict[str, dict[str, Any]]:
    """Read the servers of a file, without the keys that only other programs read."""
    try:
        text = file.read_text(encoding="utf-8")
        data: Any = json.loads(text, parse_int=str, parse_float=str)  # texts in all known keys
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the file: {error}", file=file, expected=_FORM) from None
    servers = cast("Any", data).get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError("the file has no servers", file=file, key="mcpServers", expected=_FORM)
    known = {"type", *StdioServer.model_fields, *HttpServer.model_fields}
    found: dict[str, dict[str, Any]] = {}
    for name, values in cast("dict[str, Any]", servers).items():
        key = f"mcpServers.{name}"
        if not isinstance(values, dict):
            raise ConfigError("a server is no object", file=file, key=key, expected=_FORM)
        fields = cast("dict[str, Any]", values)
        if not fields.get("disabled"):
            own = {k: value for k, value in fields.items() if k in known}
            found[name] = _expand(own, file, key)
    return found


def _expand(value: Any, file: Path, key: str) -> Any:
    """Insert environment variables into the texts of a JSON value."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _expand(field, file, f"{key}.{name}") for name, field in fields.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_expand(item, file, f"{key}[{i}]") for i, item in enumerate(items)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], cast("str | None", match[2]))
        if found is None:
            raise ConfigError(
                f"the environment variable {match[1]!r} is not set",
                file=file,
                key=key,
                expected=f"{match[1]} in the environment, or ${{{match[1]}:-default}}",
            )
        return found

    return _VARIABLE.sub(variable, value)
