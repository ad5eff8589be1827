"""Search documents: by a service in the convention of Search-R1, or in an index on this machine.

The service receives `{"queries": [...], "topk": 3, "return_scores": true}`. It returns one list for
each query: `{"result": [[{"document": {"contents": text}, "score": 7.5}, ...], ...]}`. The first
line of a text is its title. Documents without scores, and documents of `title` and `text`, are
accepted too.

`agentrl prepare search-index` makes an index. Its files stay on the disk and are mapped into
memory, so only the parts that are used are read. Threads share one index.
"""

import importlib
import json
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from agentrl.clients.http import HttpClient
from agentrl.errors import ConfigError, ServiceError
from agentrl.plugins.call import in_thread

CUT_MARKER = " ..."
NOTHING = "No results."


class Document(NamedTuple):
    r"""One document that was found.

    Example:
        >>> Document.of('"Ada Lovelace"\nShe wrote the first program.', score=7.5).title
        'Ada Lovelace'
    """

    title: str
    text: str
    score: float
    contents: str = ""
    """The service's text of title and text, unchanged; empty if it returned them separately."""

    @classmethod
    def of(cls, contents: str, *, score: float) -> "Document":
        """Read a text of both: its first line is the title, often quoted."""
        title, _, text = contents.partition("\n")
        return cls(title.strip().strip('"'), text.strip(), score, contents)


class Retriever(Protocol):
    """Finds documents for queries."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Find at most `top_k` documents for each query, the best first.

        Raises:
            ServiceError: if the search itself failed.
        """
        ...

    async def close(self) -> None:
        """Free its resources."""
        ...


def show(documents: Sequence[Document], *, max_characters: int) -> str:
    r"""Write the result of one query, as Search-R1 does.

    Example:
        >>> show([Document("Ada", "She wrote programs.", 1.0)], max_characters=9)
        'Doc 1 (Title: Ada)\nShe wrote ...\n'
    """
    if not documents:
        return NOTHING
    return "\n".join(
        f"Doc {number} (Title: {document.title})\n{_cut(document.text, max_characters)}\n"
        for number, document in enumerate(documents, start=1)
    )


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[:max_characters] + CUT_MARKER


_FORM = '{"result": [[{"document": {"contents": text}, "score": number}, ...], ...]}'


class ServiceRetriever:
    """Search by a service."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Send the queries together.

        Raises:
            ServiceError: if it does not answer, or not in this form.
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


INDEX_FILE = "index.json"
"""Written last: a folder without it is no complete index."""
FORMAT = "agentrl search index 1"


class IndexParts(NamedTuple):
    """The contents of `index.json`."""

    folder: Path
    scores: str
    """Sub-folder of the scores, in the format of bm25s."""
    texts: str
    """JSON lines of `{"id", "title", "text"}`."""
    offsets: str
    """File of the offset of each line: an array of int64."""
    stopwords: str
    """Words that are removed from queries, as from the documents."""


def read_parts(folder: Path) -> IndexParts:
    """Read which files an index has, without loading them.

    Raises:
        ConfigError: if there is no index, or it has another format.
    """
    expected = "a folder that `agentrl prepare search-index` made"
    key = "config.index_dir"
    try:
        data = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{folder} holds no search index", key=key, expected=expected) from None
    if not isinstance(data, dict) or cast("Any", data).get("format") != FORMAT:
        raise ConfigError(f"{folder} holds another kind of index", key=key, expected=expected)
    fields = cast("dict[str, str]", data)
    names = {name: fields[name] for name in IndexParts._fields if name != "folder"}
    return IndexParts(folder, **names)


class IndexRetriever:
    """Search an index by BM25, on threads."""

    def __init__(self, parts: IndexParts) -> None:
        self._parts = parts
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Search off the event loop; the first search loads the index."""

        def find_all() -> list[list[Document]]:
            with self._loading:
                if self._loaded is None:
                    self._loaded = _Loaded(self._parts)
                loaded = self._loaded
            return [loaded.search(query, top_k) for query in queries]

        return await in_thread(find_all)

    async def close(self) -> None:
        """Close the files."""
        with self._loading:
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


class _Loaded:
    """An index with files mapped into memory."""

    def __init__(self, parts: IndexParts) -> None:
        import numpy as np

        self._parts = parts
        try:
            self._scores = _library().BM25.load(parts.folder / parts.scores, mmap=True)
            self._offsets = np.load(parts.folder / parts.offsets, mmap_mode="r")
            with (parts.folder / parts.texts).open("rb") as file:
                self._texts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, KeyError) as error:
            raise ServiceError(
                f"the search index {parts.folder} cannot be read: {error}",
                service=str(parts.folder),
                expected="a folder that `agentrl prepare search-index` made, whole",
            ) from error

    def search(self, query: str, top_k: int) -> list[Document]:
        """Find the documents that share words with a query."""
        import numpy as np

        stopwords = None if self._parts.stopwords == "none" else self._parts.stopwords
        [words] = _library().tokenize(
            [query], stopwords=stopwords, return_ids=False, show_progress=False
        )
        if not words:
            return []
        scores = self._scores.get_scores(words)
        num_hits = min(top_k, len(scores))
        best = np.argpartition(scores, -num_hits)[-num_hits:]
        # Of equal scores the earlier document first: the order must not depend on `argpartition`.
        ordered = sorted(best.tolist(), key=lambda index: (-scores[index], index))
        return [self._document(i, float(scores[i])) for i in ordered if scores[i] > 0]

    def close(self) -> None:
        """Unmap the texts."""
        self._texts.close()

    def _document(self, index: int, score: float) -> Document:
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        row = json.loads(self._texts[begin:end])
        return Document(row["title"], row["text"], score)


def _library() -> Any:
    """Import bm25s, which is optional and has no types."""
    return importlib.import_module("bm25s")
