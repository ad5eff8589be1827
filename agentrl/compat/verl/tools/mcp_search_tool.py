"""`verl.tools.mcp_search_tool`: shows the results of a search server, as verl does."""

import re
from typing import Any

from agentrl.compat.verl.tools.mcp_base_tool import MCPBaseTool

_RESULTS = re.compile(r'"results"\s*:\s*(\[.*?\])', re.DOTALL)
_TITLE = re.compile(r'"title"\s*:')
_QUERY = re.compile(r'query"\s*:\s*"([^"]+)"')


class MCPSearchTool(MCPBaseTool):
    """Show the list `results` of each text of the server's answer."""

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        texts = [part.text.replace("'", '"') for part in content if part.type == "text"]
        found = [match.group(1) for text in texts if (match := _RESULTS.search(text))]
        queries = [match.group(1) if (match := _QUERY.search(text)) else "" for text in texts]
        metadata = {
            "status": "success",
            "queries": queries,
            "query_count": len(queries),
            "total_results": sum(len(_TITLE.findall(text)) for text in texts),
        }
        return "".join(found), metadata
