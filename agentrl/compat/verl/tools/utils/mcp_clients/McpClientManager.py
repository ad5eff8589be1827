"""`verl.tools.utils.mcp_clients.McpClientManager`: says where MCP servers are asked here."""

from typing import Any, NoReturn

from agentrl.errors import ConfigError


class MCPClientManager:
    """Can be imported; servers are asked by `verl.tools.mcp_base_tool.MCPBaseTool` itself."""

    async def call_tool(
        self, tool_name: str, parameters: dict[str, Any], timeout: float
    ) -> NoReturn:
        """Refuse a call.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "agentrl has no MCPClientManager",
            expected="a class that derives from verl.tools.mcp_base_tool.MCPBaseTool and overrides "
            "_parse_tool_result",
        )


ClientManager = MCPClientManager()
