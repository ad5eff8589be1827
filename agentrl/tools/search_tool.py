"""Search a corpus: by a service in the convention of Search-R1, or by an index on this machine.

tools:
- class_name: agentrl.tools.search_tool.SearchTool
config: {retriever: bm25, index_dir: data/wiki_index, top_k: 3}
"""

import json
from collections.abc import Sequence
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from agentrl.clients.http import HttpClient
from agentrl.config.schema.section import Section, UserPath
from agentrl.errors import ToolError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.environment import require_package
from agentrl.plugins.keys import read_keys
from agentrl.tools.arguments import refuse_unsendable
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.from_verl import our_names
from agentrl.tools.retrieval import (
    Document,
    IndexRetriever,
    Retriever,
    ServiceRetriever,
    read_parts,
    show,
)
from agentrl.tools.runtime.settings import SHARED_KEYS, refuse_isolation

_BETWEEN_QUERIES = "\n---\n"
_MAX_ANSWER_BYTES = 16 * 1024 * 1024

_SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for documents that help to answer a question.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query_list": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "What to search for: one query or several.",
                    }
                },
                "required": ["query_list"],
            },
        },
    }
)


class SearchConfig(Section):
    """The keys of a `SearchTool`'s own."""

    retriever: Literal["http", "bm25"] = "http"
    """http or bm25."""
    url: str | None = Field(default=None, pattern=r"^https?://", repr=False)
    """An address that begins with http:// or https://."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers of every request, by name."""
    index_dir: UserPath | None = None
    """A folder that `agentrl prepare search-index` made."""
    top_k: int = Field(default=3, ge=1)
    """A number of documents for each query, at least 1."""
    max_queries: int = Field(default=8, ge=1)
    """A number of queries in one call, at least 1."""
    max_document_characters: int = Field(default=4000, ge=1)
    """A number of characters of each document's text, at least 1."""
    result_format: Literal["text", "json"] = "text"
    """text or json."""

    @model_validator(mode="after")
    def _where_to_search(self) -> Self:
        needed, other = ("url", "index_dir") if self.retriever == "http" else ("index_dir", "url")
        if needed not in self.model_fields_set:
            verls = " (or retrieval_service_url, as verl has it)" if needed == "url" else ""
            raise ValueError(f"a key is missing: retriever {self.retriever} needs {needed}{verls}")
        if other in self.model_fields_set:
            raise ValueError(f"retriever {self.retriever} does not read {other}")
        return self


class SearchTool(BaseTool):
    """Find documents for the model's queries.

    The arguments are `query_list`, or a plain `query` where the YAML's schema has it. `config`,
    beside the keys of every tool:

    * `retriever`: `http` (default), a service at `url` with optional `headers`; or `bm25`, an index
      in `index_dir` made by `agentrl prepare search-index`.
    * `top_k`: documents for each query; 3. `max_queries`: queries in one call; 8.
    * `max_document_characters`: of each document's text; 4000.
    * `result_format`: `text` (default), or `json`: the same in `{"result": text}`, as verl has it.

    The text is that of Search-R1: `Doc 1 (Title: ...)`, a line's end, the text; `---` between the
    results of several queries; `No results.` where nothing was found.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        config = our_names(config, type(self))
        super().__init__(config, tool_schema)
        self._keys = read_keys(SearchConfig, config, key="config", also_known=SHARED_KEYS)
        refuse_isolation(config, because="a SearchTool only waits for others, and blocks nothing")
        self._retriever = _make_retriever(self._keys)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema that a YAML need not repeat."""
        return self.tool_schema or _SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Search for every query of the call.

        Raises:
            ToolError: for a call without queries, or with too many.
            ServiceError: where the search itself failed.
        """
        refuse_unsendable(parameters)
        queries = self._queries(parameters)
        found = await self._retriever.search(queries, self._keys.top_k)
        return ToolResult(ToolResponse(text=self.render(found)), metrics=_metrics(found))

    def render(self, found: Sequence[Sequence[Document]]) -> str:
        """Word what each query found."""
        limit = self._keys.max_document_characters
        text = _BETWEEN_QUERIES.join(show(one, max_characters=limit) for one in found)
        if self._keys.result_format == "json":
            text = json.dumps({"result": text}, ensure_ascii=False)
        return text

    async def shutdown(self) -> None:
        """Close the connections, or the index."""
        await self._retriever.close()

    def _queries(self, parameters: dict[str, Any]) -> list[str]:
        given = parameters.get("query_list", parameters.get("query"))
        asked = [given] if isinstance(given, str) else given
        if not isinstance(asked, list) or not asked:
            raise ToolError("Error: give query_list, a list with at least one query")
        queries = [query for query in cast("list[Any]", asked) if isinstance(query, str)]
        if len(queries) < len(cast("list[Any]", asked)):
            raise ToolError("Error: each query must be a text")
        if len(queries) > self._keys.max_queries:
            raise ToolError(f"Error: ask at most {self._keys.max_queries} queries at once")
        return queries


def _make_retriever(keys: SearchConfig) -> Retriever:
    if keys.url is not None:
        client = HttpClient(keys.url, headers=keys.headers, max_bytes=_MAX_ANSWER_BYTES)
        return ServiceRetriever(client)
    require_package("bm25s", extra="search", what="retriever bm25")
    return IndexRetriever(read_parts(cast("UserPath", keys.index_dir)))


def _metrics(found: list[list[Document]]) -> dict[str, int]:
    return {"num_queries": len(found), "num_documents": sum(map(len, found))}
