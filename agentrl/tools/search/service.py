"""A retrieval service in the convention of Search-R1.

It is sent `{"queries": [...], "topk": 3, "return_scores": true}` and answers with one list for each
query: `{"result": [[{"document": {"contents": text}, "score": 7.5}, ...], ...]}`, where a text's
first line is its title. Documents by themselves, without scores, and documents of `title` and
`text` are read too.
"""

from collections.abc import Sequence
from typing import Any, cast

from agentrl.clients.http import HttpClient
from agentrl.errors import ServiceError
from agentrl.tools.search.documents import Document

_FORM = '{"result": [[{"document": {"contents": text}, "score": number}, ...], ...]}'


class ServiceRetriever:
    """Ask a service."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Send the queries together.

        Raises:
            ServiceError: where it does not answer, or not in this form.
        """
        body = {"queries": list(queries), "topk": top_k, "return_scores": True}
        answer = await self._client.send("POST", body=body)
        if answer.status != 200:
            raise self._wrong(f"status {answer.status}: {answer.text[:200]}")
        if answer.is_cut:
            raise self._wrong("an answer that is too long")
        data = answer.json(service=self._client.shown_url)
        result = cast("Any", data).get("result") if isinstance(data, dict) else None
        if not isinstance(result, list) or len(cast("list[Any]", result)) != len(queries):
            raise self._wrong(f"{len(queries)} queries, answered with {answer.text[:200]!r}")
        return [self._found(found)[:top_k] for found in cast("list[Any]", result)]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _found(self, found: Any) -> list[Document]:
        if not isinstance(found, list):
            raise self._wrong(f"a result that is no list: {found!r:.200}")
        return [self._document(hit) for hit in cast("list[Any]", found)]

    def _document(self, hit: Any) -> Document:
        match hit:
            case {"document": {"contents": str(contents)}, **rest}:
                return Document.of(contents, score=float(rest.get("score") or 0.0))
            case {"contents": str(contents)}:
                return Document.of(contents, score=0.0)
            case {"document": {"text": str(text), **of}, **rest}:
                score = float(rest.get("score") or 0.0)
                return Document(str(of.get("title") or ""), text, score)
            case _:
                raise self._wrong(f"a document without contents: {hit!r:.200}")

    def _wrong(self, what: str) -> ServiceError:
        url = self._client.shown_url
        return ServiceError(f"the retriever {url}: {what}", service=url, expected=_FORM)
