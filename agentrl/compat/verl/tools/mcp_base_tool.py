"""`verl.tools.mcp_base_tool`: agentrl's tool of MCP servers, with verl's hook for results."""

from typing import Any

from agentrl.messages import ToolResponse
from agentrl.tools.base import ToolResult
from agentrl.tools.mcp_tool import MCPTool


class MCPBaseTool(MCPTool):
    """Pass calls on to a tool of an MCP server; `_parse_tool_result` words what it answers."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the tool, and word the texts of its answer, errors of the server included."""
        text, metadata = self._parse_tool_result(
            list((await self.ask(instance_id, parameters)).content)
        )
        metrics = {
            "query_count": metadata.get("query_count", 0),
            "status": metadata.get("status", "unknown"),
            "total_results": metadata.get("total_results", 0),
        }
        return ToolResult(ToolResponse(text=text), 0.0, metrics)

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Word the parts of an answer; subclasses override it. Returns text and metadata."""
        return " ".join(part.text for part in content if part.type == "text"), {}
