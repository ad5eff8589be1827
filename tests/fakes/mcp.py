"""Tool YAMLs for MCP servers, and what is left of the servers."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from agentrl.tools import BaseTool, initialize_tools_from_config

SCRIPT = Path(__file__).with_name("mcp_server.py")


def fake(*how: str) -> dict[str, Any]:
    """Return the server that behaves so."""
    return {"command": sys.executable, "args": ["-S", "-I", str(SCRIPT), *how]}


def yaml_of(folder: Path, *entries: Mapping[str, Any], **config: Any) -> Path:
    """Write a tool YAML with an entry for each `mcp` section."""
    path = folder / "tools.yaml"
    name = "agentrl.tools.mcp_tool.MCPTool"
    tools = [{"class_name": name, "config": config, "mcp": entry} for entry in entries]
    path.write_text(json.dumps({"tools": tools}))
    return path


def load(folder: Path, *entries: Mapping[str, Any], **config: Any) -> dict[str, BaseTool]:
    """Load the tools of such a YAML, by name."""
    tools = initialize_tools_from_config(yaml_of(folder, *entries, **config))
    return {tool.name: tool for tool in tools}


def servers_alive() -> int:
    """Count the processes that were started here and have not ended."""
    children = psutil.Process().children(recursive=True)
    commands = [
        " ".join(child.cmdline())
        for child in children
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]
    servers = [c for c in commands if SCRIPT.name in c or "server-everything" in c]
    return sum("relay.py" not in command for command in servers)
