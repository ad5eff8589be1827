"""What a search finds, and how the model is shown it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    """The service's one text for title and text, as it was; empty if it gave them apart."""

    @classmethod
    def of(cls, contents: str, *, score: float) -> "Document":
        """Read the field's one text for both: a first line with the title, often quoted."""
        title, _, text = contents.partition("\n")
        return cls(title.strip().strip('"'), text.strip(), score, contents)


class Retriever(Protocol):
    """Who finds documents."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Document]]:
        """Find at most `top_k` documents for each query, the best first.

        Raises:
            ServiceError: where the search itself failed.
        """
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


def show(documents: Sequence[Document], *, max_characters: int) -> str:
    r"""Write what one query found, as Search-R1 does.

    Example:
        >>> show([Document("Ada", "She wrote programs.", 1.0)], max_characters=9)
        'Doc 1 (Title: Ada)\nShe wrote ...\n'
    """
    if not documents:
        return NOTHING
    return "\n".join(
        f"Doc {place} (Title: {document.title})\n{_cut(document.text, max_characters)}\n"
        for place, document in enumerate(documents, start=1)
    )


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[:max_characters] + CUT_MARKER
