"""Tools of verl's: which of ours stands for each, and what their keys are called here."""

from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError
from agentrl.tools.base import BaseTool

STAND_INS = (
    "verl.tools.gsm8k_tool.Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool",
    "verl.tools.mcp_base_tool.MCPBaseTool",
    "verl.tools.mcp_search_tool.MCPSearchTool",
    "verl.tools.search_tool.SearchTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool",
)
"""Class paths of verl's tools that `agentrl.compat` stands in for, with verl's texts."""

RENAMED_KEYS: Mapping[str, Mapping[str, str | None]] = {
    "agentrl.tools.mcp_tool.MCPTool": {"timeout": "timeout_s"},
    "agentrl.tools.search_tool.SearchTool": {
        "retrieval_service_url": "url",
        "topk": "top_k",
        "timeout": "timeout_s",
        "num_workers": "max_concurrency",
    },
    # There a limit of calls at work, as num_workers is; here one of calls in a second.
    "agentrl.compat.verl.tools.search_tool.SearchTool": {
        "rate_limit": None,
        "enable_global_rate_limit": None,
    },
}
"""Keys of `config` that have another name here, by the class that an entry names, is of, or derives
from; None: a key that has nothing to say here, and is dropped."""


def our_names(config: Mapping[str, Any], found: type[BaseTool]) -> dict[str, Any]:
    """Read verl's names of keys as ours.

    Args:
        config: Of an entry.
        found: Its class.

    Raises:
        ConfigError: for a key under both of its names.
    """
    names: dict[str, str | None] = {}
    for base in found.__mro__:
        names |= RENAMED_KEYS.get(f"{base.__module__}.{base.__qualname__}", {})
    ours: dict[str, Any] = {}
    for name, value in config.items():
        new_name = names.get(name, name)
        if new_name != name and new_name in config:
            raise ConfigError(
                f"{name} and {new_name} say the same thing",
                key=f"config.{name}",
                expected=f"{new_name} alone",
            )
        if new_name is not None:
            ours[new_name] = value
    return ours
