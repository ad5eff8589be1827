"""`verl.tools.utils.tool_registry`: from a YAML to tools."""

from agentrl.plugins import load_class
from agentrl.plugins.from_verl import translate
from agentrl.tools.base import BaseTool
from agentrl.tools.from_verl import STAND_INS
from agentrl.tools.registry import initialize_tools_from_config

__all__ = ["get_tool_class", "initialize_tools_from_config"]


def get_tool_class(cls_name: str) -> type[BaseTool]:
    """Load a tool's class by its path.

    Raises:
        PluginError: for a path that does not lead to a tool.
    """
    return load_class(translate(cls_name, STAND_INS, base="BaseTool"), BaseTool)
