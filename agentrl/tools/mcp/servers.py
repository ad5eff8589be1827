"""Which MCP servers there are: from the YAML itself, or from the file that other programs read too.

The file has the well-known form `{"mcpServers": {"name": {"command": ..., "args": [...]}}}`. In its
texts `${NAME}` and `${NAME:-default}` are read from the environment (`${oc.env:NAME}` as well), so
that no secret need stand in it. Keys that only other programs read are passed over; a server with
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
from urllib.parse import urlsplit, urlunsplit

from pydantic import ConfigDict, Field

from agentrl.config.schema.section import Section, UserPath
from agentrl.errors import ConfigError
from agentrl.plugins.keys import read_keys

_VARIABLE = re.compile(r"\$\{(?:oc\.env:)?(\w+)(?:(?::-|,)([^}]*))?\}")
_FORM = 'an object {"mcpServers": {name: {"command", "args", "env"} or {"url", "headers"}}}'


class SessionScope(StrEnum):
    """Who shares a session with a server; `mcp.session` of the YAML."""

    SHARED = "shared"
    """The whole run: one session for each server, opened when it is first called."""
    PER_REQUEST = "per_request"
    """Nobody: each request has its own, from its first turn to its end. For servers with state."""


class StdioServer(Section):
    """A server that is started as a process, and spoken to over its standard streams."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    command: str = Field(min_length=1)
    """The program to start: a name on the PATH, or a path."""
    args: tuple[str, ...] = ()
    """A list of its arguments."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables by name. Of ours it is given HOME, PATH, USER and the like, no more."""
    cwd: UserPath | None = None
    """The folder that it is started in; null: the current one."""


class HttpServer(Section):
    """A server that runs already, and is reached over streamable HTTP."""

    url: str = Field(pattern=r"^https?://")
    """An address that begins with http:// or https://."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers of every request, by name."""

    @property
    def shown_url(self) -> str:
        """The address without what may be secret: user, password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


ServerSpec = StdioServer | HttpServer


@dataclass(frozen=True, slots=True)
class Server:
    """One server of an entry."""

    name: str
    spec: ServerSpec
    connect_timeout_s: float

    @property
    def in_words(self) -> str:
        """Its name, and its address where it has one."""
        at = f" at {self.spec.shown_url}" if isinstance(self.spec, HttpServer) else ""
        return f"{self.name!r}{at}"

    @property
    def identity(self) -> str:
        """Equal for entries that mean the same server, which then share its sessions."""
        return json.dumps([self.name, self.connect_timeout_s, self.spec.model_dump(mode="json")])


class McpSection(Section):
    """The `mcp` section of a tool entry."""

    mcp_servers_config_path: UserPath | None = None
    """A JSON file of servers; looked for beside the YAML, then in the current folder."""
    servers: dict[str, dict[str, Any]] | None = Field(default=None, repr=False)
    """Servers by name, in place of the file: {command, args, env, cwd} or {url, headers}."""
    tool_selected_list: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A list of names of the tools to take, as the servers name them; null: all of them."""
    session: SessionScope = SessionScope.SHARED
    """shared or per_request."""
    prefix: str = ""
    """A text before each tool's name, in which {server} is the server's name."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for a server to start and to greet, more than 0."""


def read_servers(section: McpSection, *, file: Path, key: str) -> list[Server]:
    """Read the servers that a section names.

    Args:
        section: From the YAML.
        file: The YAML, beside which a relative path is looked for.
        key: Of the section, for the errors.

    Raises:
        ConfigError: for both or neither of the two ways to name servers, a file that cannot be
            read, an unknown key, a variable that is not set.
    """
    if (section.servers is None) == (section.mcp_servers_config_path is None):
        raise ConfigError(
            f"{key} must name its servers in one way",
            file=file,
            key=key,
            expected="either mcp_servers_config_path or servers",
        )
    if section.mcp_servers_config_path is not None:
        file, key = _located(section.mcp_servers_config_path, file, key), "mcpServers"
        found = _read_file(file)
    else:
        found, key = cast("dict[str, dict[str, Any]]", section.servers), f"{key}.servers"
    if not found:
        raise ConfigError("there is no server", file=file, key=key, expected="at least one")
    return [
        Server(name, _spec(values, file, f"{key}.{name}"), section.connect_timeout_s)
        for name, values in found.items()
    ]


def _spec(values: Mapping[str, Any], file: Path, key: str) -> ServerSpec:
    if values.get("type") == "sse":
        raise ConfigError(
            "the SSE transport was replaced by streamable HTTP, and is not spoken here",
            file=file,
            key=f"{key}.type",
            expected="the server's address for streamable HTTP (often .../mcp)",
        )
    model = HttpServer if "url" in values else StdioServer
    return read_keys(model, values, key=key, file=file, also_known=("type",))


def _located(path: Path, yaml: Path, key: str) -> Path:
    for folder in (yaml.parent, Path.cwd()):
        if (folder / path).is_file():
            return folder / path
    raise ConfigError(
        f"no file {path}, neither beside the YAML nor in {Path.cwd()}",
        file=yaml,
        key=f"{key}.mcp_servers_config_path",
        expected="a JSON file of MCP servers",
    )


def _read_file(file: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the file: {error}", file=file, expected=_FORM) from None
    servers = cast("Any", data).get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError("the file has no servers", file=file, key="mcpServers", expected=_FORM)
    named = cast("dict[str, Any]", servers)
    for name, values in named.items():
        if not isinstance(values, dict):
            raise ConfigError(
                "a server is no object", file=file, key=f"mcpServers.{name}", expected=_FORM
            )
    return {
        name: _own_keys(values, file, f"mcpServers.{name}")
        for name, values in named.items()
        if not values.get("disabled")
    }


def _own_keys(values: Mapping[str, Any], file: Path, key: str) -> dict[str, Any]:
    known = {"type", *StdioServer.model_fields, *HttpServer.model_fields}
    return {k: _expanded(v, file, f"{key}.{k}") for k, v in values.items() if k in known}


def _expanded(value: Any, file: Path, key: str) -> Any:
    """Put the environment's values into the texts of a JSON value."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _expanded(field, file, f"{key}.{name}") for name, field in fields.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_expanded(item, file, f"{key}[{i}]") for i, item in enumerate(items)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], cast("str | None", match[2]))
        if found is None:
            raise ConfigError(
                f"the environment has no variable {match[1]!r}",
                file=file,
                key=key,
                expected=f"{match[1]} in the environment, or ${{{match[1]}:-default}}",
            )
        return found

    return _VARIABLE.sub(variable, value)
