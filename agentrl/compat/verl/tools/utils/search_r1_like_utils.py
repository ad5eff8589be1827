"""`verl.tools.utils.search_r1_like_utils`: one request to a retrieval service, from a thread."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from agentrl.clients.http import HttpClient
from agentrl.errors import ServiceError
from agentrl.tools.retrieval import Document, ServiceRetriever

DEFAULT_TIMEOUT = 30
_MAX_ANSWER_BYTES = 16 * 1024 * 1024


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: int = DEFAULT_TIMEOUT,
) -> tuple[str, dict[str, Any]]:
    """Search for several queries, on a thread without an event loop.

    Returns:
        What the policy is shown, and how it went: `status`, `query_count`, `total_results`,
        `api_request_error`.
    """
    metadata: dict[str, Any] = {"query_count": len(query_list), "queries": query_list}
    metadata |= {"api_request_error": None, "total_results": 0, "status": "success"}
    with concurrent_semaphore or nullcontext():
        try:
            found = asyncio.run(_search(retrieval_service_url, query_list, topk, timeout))
        except (ServiceError, TimeoutError) as error:
            metadata |= {"status": "api_error", "api_request_error": str(error)}
            return json.dumps({"result": f"Search error: {error}"}, ensure_ascii=False), metadata
    metadata["total_results"] = sum(map(len, found))
    return write_found(found), metadata


def write_found(found: Sequence[Sequence[Document]]) -> str:
    """Write what was found as verl does: whole, titles with their quotes, as JSON."""
    text = "\n---\n".join(_passages(documents) for documents in found)
    return json.dumps({"result": text}, ensure_ascii=False)


def _passages(documents: Sequence[Document]) -> str:
    parts = (document.contents.partition("\n") for document in documents)
    shown = (
        f"Doc {place} (Title: {title})\n{text}\n\n"
        for place, (title, _, text) in enumerate(parts, start=1)
    )
    return "".join(shown).strip()


async def _search(
    url: str, queries: list[str], top_k: int, timeout_s: float
) -> list[list[Document]]:
    retriever = ServiceRetriever(HttpClient(url, headers={}, max_bytes=_MAX_ANSWER_BYTES))
    try:
        async with asyncio.timeout(timeout_s):
            return await retriever.search(queries, top_k)
    finally:
        await retriever.close()
