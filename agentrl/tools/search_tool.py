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
from agentrl.plugins.from_verl import our_names
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool, function_schema, refuse_unsendable
from agentrl.tools.retrieval import (
    Document,
    IndexRetriever,
    Retriever,
    ServiceRetriever,
    read_parts,
    show,
)

_BETWEEN_QUERIES = "\n---\n"
_MAX_ANSWER_BYTES = 16 * 1024 * 1024


class SearchConfig(Section):
    """The own keys of `SearchTool`."""

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


class SearchTool(BundledTool):
    """Find documents for the model's queries.

    The arguments are `query_list`, or a plain `query` if the YAML's schema has it. `config`, in
    addition to the keys of every tool:

    * `retriever`: `http` (default), a service at `url` with optional `headers`; or `bm25`, an index
      in `index_dir` made by `agentrl prepare search-index`.
    * `top_k`: documents for each query; 3. `max_queries`: queries in one call; 8.
    * `max_document_characters`: of each document's text; 4000.
    * `result_format`: `text` (default), or `json`: the same in `{"result": text}`, as in verl.

    The text has the form of Search-R1: `Doc 1 (Title: ...)`, a line end, the text; `---` between
    the results of several queries; `No results.` if nothing was found.
    """

    keys_class = SearchConfig
    why_inline = "a SearchTool only waits for others, and blocks nothing"
    default_schema = function_schema(
        "search",
        "Search for documents that help to answer a question.",
        query_list={
            "type": "array",
            "items": {"type": "string"},
            "description": "What to search for: one query or several.",
        },
    )

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(our_names(config, type(self)), tool_schema)
        keys = self._keys
        self._retriever: Retriever
        if keys.url is not None:
            client = HttpClient(keys.url, headers=keys.headers, max_bytes=_MAX_ANSWER_BYTES)
            self._retriever = ServiceRetriever(client)
        else:
            require_package("bm25s", extra="search", what="retriever bm25")
            self._retriever = IndexRetriever(read_parts(cast("UserPath", keys.index_dir)))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Search for every query of the call.

        Raises:
            ToolError: if the call has no queries, or too many.
            ServiceError: if the search itself failed.
        """
        refuse_unsendable(parameters)
        queries = self._queries(parameters)
        found = await self._retriever.search(queries, self._keys.top_k)
        metrics = {"num_queries": len(found), "num_documents": sum(map(len, found))}
        return ToolResult(ToolResponse(text=self.render(found)), metrics=metrics)

    def render(self, found: Sequence[Sequence[Document]]) -> str:
        """Return the results of each query as text."""
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
