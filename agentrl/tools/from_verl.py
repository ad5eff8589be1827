"""Tools of verl's: which of ours stands for each, and what their keys are called here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.plugins.from_verl import OwnClass
from agentrl.tools.base import BaseTool

_MCP_TOOL = OwnClass("agentrl.tools.mcp_tool.MCPTool")

OWN_CLASSES = {
    "verl.tools.gsm8k_tool.Gsm8kTool": OwnClass("agentrl.tools.gsm8k_tool.Gsm8kTool"),
    "verl.tools.mcp_base_tool.MCPBaseTool": _MCP_TOOL,
    "verl.tools.mcp_search_tool.MCPSearchTool": _MCP_TOOL,
    "verl.tools.search_tool.SearchTool": OwnClass(
        "agentrl.tools.search_tool.SearchTool", config={"result_format": "json"}
    ),
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": OwnClass(
        "agentrl.tools.sandbox_fusion_tool.SandboxFusionTool"
    ),
}
"""Class paths of bundled tools that users bring along, and ours."""

RENAMED_KEYS: Mapping[str, Mapping[str, str | None]] = {
    "agentrl.tools.mcp_tool.MCPTool": {"timeout": "timeout_s"},
    "agentrl.tools.search_tool.SearchTool": {
        "retrieval_service_url": "url",
        "topk": "top_k",
        "timeout": "timeout_s",
        "num_workers": "max_concurrency",
    },
    # There a limit of calls at work, as num_workers is; here one of calls in a second.
    "verl.tools.search_tool.SearchTool": {"rate_limit": None, "enable_global_rate_limit": None},
}
"""Keys of `config` that have another name here, by the class that an entry names, is of, or derives
from; None: a key that has nothing to say here, and is dropped."""


def with_our_keys(
    config: Mapping[str, Any], *, named: str, found: type[BaseTool], file: str | Path, key: str
) -> dict[str, Any]:
    """Read verl's names of keys as ours, and add what makes our class behave as theirs.

    Args:
        config: Of an entry.
        named: The class that the entry names.
        found: The class that it is.
        file: The YAML.
        key: Of the entry's `config`.

    Raises:
        ConfigError: for a key under both of its names.
    """
    names: dict[str, str | None] = {}
    for path in (named, *(f"{base.__module__}.{base.__qualname__}" for base in found.__mro__)):
        names |= RENAMED_KEYS.get(path, {})
    ours = dict(OWN_CLASSES[named].config) if named in OWN_CLASSES else {}
    for name, value in config.items():
        new_name = names.get(name, name)
        if new_name != name and new_name in config:
            raise ConfigError(
                f"{name} and {new_name} say the same thing",
                file=file,
                key=f"{key}.{name}",
                expected=f"{new_name} alone",
            )
        if new_name is not None:
            ours[new_name] = value
    return ours
