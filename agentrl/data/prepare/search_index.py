"""Make a BM25 index of a corpus. `SearchTool` maps it into memory.

The corpus is read line by line, and its texts are written to the disk at once. Only the word
numbers (four bytes each) and the index are in memory. All files are written to a draft folder and
then renamed, `index.json` last: a folder with that file is complete.
"""

import importlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from agentrl.atomic_io import atomic_file, naming_path
from agentrl.config.schema.prepare import SearchIndexConfig
from agentrl.data.prepare.manifest import content_of, make_once
from agentrl.errors import DataError
from agentrl.plugins.environment import require_package
from agentrl.progress import NO_PROGRESS, Advance, Progress

_MAKER = "search-index/1"
_FORMAT = "agentrl search index 1"
_INDEX, _SCORES, _TEXTS, _OFFSETS = "index.json", "bm25", "texts.jsonl", "offsets.npy"
_DRAFT = "unfinished"
_EXPECTED = '{"id", "contents"} or {"id", "title", "text"}, all of them texts'


class SearchIndexFiles(NamedTuple):
    """The index, and whether this call made it."""

    index_dir: Path
    """Value for `index_dir` of a `SearchTool`."""
    num_documents: int
    made: bool


class _Text(NamedTuple):
    """A document of the corpus."""

    id: str
    title: str
    text: str


def prepare_search_index(
    config: SearchIndexConfig, progress: Progress = NO_PROGRESS
) -> SearchIndexFiles:
    """Make the index, unless it exists; display how many documents are read.

    Raises:
        DataError: If the corpus cannot be read, a row is not valid (with its line), or `out_dir`
            has other files of these names.
        MissingExtraError: If bm25s is not installed.
    """
    require_package("bm25s", extra="search", what="an index")
    if not config.corpus.is_file():
        raise DataError(
            f"no file {config.corpus}", file=config.corpus, expected="a corpus of JSON lines"
        )
    out_dir = config.out_dir
    arguments = config.model_dump(mode="json", exclude={"out_dir", "corpus"})
    arguments["of"] = content_of(config.corpus)
    files = [out_dir / name for name in (_SCORES, _TEXTS, _OFFSETS, _INDEX)]
    made = make_once(out_dir, _MAKER, arguments, files, lambda: _write(config, progress))
    index = json.loads((out_dir / _INDEX).read_text(encoding="utf-8"))
    return SearchIndexFiles(out_dir, index["num_documents"], made)


def _write(config: SearchIndexConfig, progress: Progress) -> None:
    out_dir, draft = config.out_dir, config.out_dir / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)  # from a run that was killed
    draft.mkdir(parents=True)
    try:
        with naming_path(out_dir), progress.bar("documents", None) as advance:
            num_documents = _build(config, draft, advance)
            (out_dir / _INDEX).unlink(missing_ok=True)
            shutil.rmtree(out_dir / _SCORES, ignore_errors=True)
            for name in (_SCORES, _TEXTS, _OFFSETS):
                os.replace(draft / name, out_dir / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    index = {
        "format": _FORMAT,
        "num_documents": num_documents,
        "scores": _SCORES,
        "texts": _TEXTS,
        "offsets": _OFFSETS,
        "stopwords": config.stopwords,
    }
    with atomic_file(out_dir / _INDEX) as partial:
        partial.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _build(config: SearchIndexConfig, draft: Path, advance: Advance) -> int:
    """Write texts, offsets and scores. Return the number of documents."""
    import numpy as np

    library: Any = importlib.import_module("bm25s")
    stopwords = None if config.stopwords == "none" else config.stopwords
    tokenizer = library.tokenization.Tokenizer(stopwords=stopwords)
    offsets = array("q", [0])
    with (draft / _TEXTS).open("wb") as kept:
        texts = _write_texts(_read(config.corpus), kept, offsets)
        streamed = tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False)
        words: list[array[int]] = []
        for ids in streamed:
            words.append(array("i", ids))
            advance()
    vocabulary = tokenizer.get_vocab_dict()
    if not vocabulary:
        raise DataError("the corpus has no words to index", file=config.corpus, expected=_EXPECTED)
    np.save(draft / _OFFSETS, np.asarray(offsets, dtype=np.int64))
    scores = library.BM25(k1=config.k1, b=config.b)
    scores.index((words, vocabulary), create_empty_token=False, show_progress=False)
    scores.save(draft / _SCORES, show_progress=False)
    return len(words)


def _write_texts(rows: Iterator[_Text], kept: BinaryIO, offsets: "array[int]") -> Iterator[str]:
    """Write each document, record the offset of its end, and yield the text to index."""
    for row in rows:
        line = json.dumps(row._asdict(), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        kept.write(line)
        offsets.append(offsets[-1] + len(line))
        yield f"{row.title}\n{row.text}"


def _read(corpus: Path) -> Iterator[_Text]:
    try:
        with corpus.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _document(line, number, corpus)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the corpus: {error}", file=corpus) from None


def _document(line: str, number: int, corpus: Path) -> _Text:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"line {number} is not JSON: {error}", file=corpus, line=number, expected=_EXPECTED
        ) from None
    match row:
        case {"contents": str(contents), **rest}:
            title, _, text = contents.partition("\n")
            return _Text(str(rest.get("id", number - 1)), title.strip().strip('"'), text.strip())
        case {"text": str(text), **rest} if isinstance(rest.get("title") or "", str):
            return _Text(str(rest.get("id", number - 1)), rest.get("title") or "", text)
        case _:
            raise DataError(
                f"line {number} is not a document: {line.strip():.80}",
                file=corpus,
                line=number,
                expected=_EXPECTED,
            )
