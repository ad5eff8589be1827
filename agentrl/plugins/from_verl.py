"""Class paths, keys and imports of plug-ins that were written for verl."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, PluginError

logger = logging.getLogger(__name__)

VERL_TOOLS = (
    "verl.tools.gsm8k_tool.Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool",
    "verl.tools.mcp_base_tool.MCPBaseTool",
    "verl.tools.mcp_search_tool.MCPSearchTool",
    "verl.tools.search_tool.SearchTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool",
)
"""Class paths of verl's tools that `agentrl.compat` has too, with verl's texts."""
VERL_INTERACTIONS = (
    "verl.interactions.base.BaseInteraction",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction",
    "verl.interactions.weather_interaction.WeatherInteraction",
)
"""Class paths of verl's interactions that `agentrl.compat` has too, with verl's texts."""
RENAMED_KEYS: Mapping[str, Mapping[str, str | None]] = {
    "agentrl.tools.mcp_tool.MCPTool": {"timeout": "timeout_s"},
    "agentrl.tools.search_tool.SearchTool": {
        "retrieval_service_url": "url",
        "topk": "top_k",
        "timeout": "timeout_s",
        "num_workers": "max_concurrency",
    },
    # In verl it limits concurrent calls, as num_workers does; agentrl's limits calls per second.
    "agentrl.compat.tools.SearchTool": {
        "rate_limit": None,
        "enable_global_rate_limit": None,
    },
    "agentrl.compat.tools.ImageZoomInTool": dict.fromkeys(
        ("num_workers", "rate_limit", "timeout", "enable_global_rate_limit")
    ),
}
"""agentrl's name for verl's keys of a tool's `config`, by the class of the tool or a base class of
it; None: the key has no meaning in agentrl and is dropped."""
SWITCH_HINT = (
    "; set AGENTRL_VERL=1 in the environment, and agentrl serves the imports of verl, or change "
    "the import lines (docs/from_verl.md)"
)
"""Added to the error of code that imports verl, if verl is not installed."""

_COMPAT = "agentrl.compat."


def translate(path: str, known: Collection[str], *, base: str) -> str:
    """Return the path of agentrl's class for one of verl's; any other path as it is.

    Args:
        path: As the YAML has it.
        known: Class paths of verl that agentrl has too.
        base: The base class of a user's own class, such as `agentrl.tools.BaseTool`.

    Raises:
        PluginError: for a class of verl that agentrl does not have.
    """
    if path in known:
        return _COMPAT + path
    if path.startswith("verl."):
        raise PluginError(
            f"{path} is a path into verl, and agentrl has no counterpart of it",
            expected=f"one of {', '.join(known)}, or a class of your own that derives from {base}",
        )
    return path


def name_translated(paths: Iterable[str], known: Collection[str]) -> list[str]:
    """Name agentrl's class for each class path that is verl's."""
    return [f"{path} -> {_COMPAT}{path}" for path in dict.fromkeys(paths) if path in known]


def our_names(config: Mapping[str, Any], found: type) -> dict[str, Any]:
    """Replace verl's names of keys by agentrl's.

    Args:
        config: The `config` of an entry.
        found: The class of the entry.

    Raises:
        ConfigError: if a key is given under both of its names.
    """
    names = _names_of(found)
    ours: dict[str, Any] = {}
    for name, value in config.items():
        new_name = names.get(name, name)
        if new_name != name and new_name in config:
            raise ConfigError(
                f"{name} and {new_name} are two names of one key",
                key=f"config.{name}",
                expected=f"{new_name} alone",
            )
        if new_name is not None:
            ours[new_name] = value
    return ours


def warn_of_dropped_keys(
    config: Mapping[str, Any], found: type, *, file: str | Path, key: str, read: Sequence[str] = ()
) -> None:
    """Warn of keys that a class path of verl gives no effect.

    Args:
        config: The `config` of an entry.
        found: The class of the entry.
        file: The YAML.
        key: The key of `config` in it.
        read: If not empty, the class is one of agentrl's counterparts and reads these keys alone.
    """
    names = _names_of(found)
    for name in config:
        if names.get(name, name) is None or (read and name not in read):
            logger.warning(
                "%s: %s.%s has no effect under verl's class path; agentrl's own %s may read it, "
                "under a class path of agentrl (docs/bundled_tools.md, docs/interactions.md)",
                *(file, key, name, found.__name__),
            )


def _names_of(found: type) -> dict[str, str | None]:
    names: dict[str, str | None] = {}
    for base in found.__mro__:
        names |= RENAMED_KEYS.get(f"{base.__module__}.{base.__qualname__}", {})
    return names


def switch_hint(error: BaseException) -> str:
    """Return the hint for an import that failed for lack of verl; empty for other errors."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    lacks = name is not None and name.partition(".")[0] == "verl"
    return SWITCH_HINT if lacks and "stand-in" not in str(error) else ""


def derives_from_verl(found: type) -> bool:
    """Whether a class derives from a class of the real verl, which is installed then."""
    return any(base.__module__.partition(".")[0] == "verl" for base in found.__mro__)
