"""`verl.tools.search_tool`: agentrl's tool, with verl's keys and texts."""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.compat.verl.tools.utils.search_r1_like_utils import write_found
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.base import ToolResult
from agentrl.tools.retrieval import Document
from agentrl.tools.search_tool import SearchTool as OwnSearchTool

_NO_QUERIES = "Error: 'query_list' is missing, empty, or not a list in parameters."


class SearchTool(OwnSearchTool):
    """Search a retrieval service, and show the policy verl's text.

    Args:
        config: verl's keys (`retrieval_service_url`, `topk`, `timeout`, `num_workers`), or ours.
        tool_schema: What the policy is shown.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.retrieval_service_url = self._keys.url
        self.topk = self._keys.top_k
        self.timeout = self.config.get("timeout_s", 30)
        self.num_workers = self.config.get("max_concurrency", 120)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Search for every query of the call; a call without queries is answered, as in verl."""
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            text = json.dumps({"result": _NO_QUERIES})
            return ToolResult(ToolResponse(text=text), 0.0)
        result = await super().execute(instance_id, parameters, **execute_kwargs)
        return result._replace(reward=0.0)

    def render(self, found: Sequence[Sequence[Document]]) -> str:
        """Write what was found as verl does."""
        return write_found(found)
