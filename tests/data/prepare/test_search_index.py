"""The index of a corpus: whole or absent, the same from the same corpus, bad rows named by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema.prepare import SearchIndexConfig
from agentrl.data.prepare import search_index
from agentrl.data.prepare.search_index import SearchIndexFiles, prepare_search_index
from agentrl.errors import DataError, MissingExtraError
from agentrl.tools.retrieval import IndexRetriever, read_parts

ROWS = [
    {"id": "a", "contents": '"Title"\nwords and\nmore words'},
    {"id": 7, "title": "Other", "text": "different words"},
    {"text": "no title"},
    {"id": "empty", "contents": ""},
]


def corpus_of(folder: Path, *rows: Any) -> Path:
    corpus = folder / "corpus.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    corpus.write_text("\n".join(lines) + "\n")
    return corpus


def made(folder: Path, *rows: Any, name: str = "index", **keys: Any) -> SearchIndexFiles:
    corpus = corpus_of(folder, *rows)
    return prepare_search_index(SearchIndexConfig(out_dir=folder / name, corpus=corpus, **keys))


async def titles(folder: Path, query: str) -> list[str]:
    retriever = IndexRetriever(read_parts(folder))
    [found] = await retriever.search([query], 5)
    await retriever.close()
    return [document.title for document in found]


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


async def test_rows_of_each_form_are_found(tmp_path: Path):
    files = made(tmp_path, *ROWS, "")
    assert files.made
    assert files.num_documents == 4
    assert await titles(files.index_dir, "different") == ["Other"]
    assert await titles(files.index_dir, "title") == ["", "Title"]  # the shorter one first
    assert await titles(files.index_dir, "words") == ["Title", "Other"]
    texts = (files.index_dir / "texts.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in texts] == ["a", "7", "2", "empty"]


def test_the_same_corpus_makes_the_same_files_and_makes_them_once(tmp_path: Path):
    first = made(tmp_path, *ROWS)
    second = made(tmp_path, *ROWS, name="again")
    assert contents(first.index_dir) == contents(second.index_dir)
    assert not made(tmp_path, *ROWS).made
    with pytest.raises(DataError, match=r"k1: 1\.5 -> 1\.2"):
        made(tmp_path, *ROWS, k1=1.2)
    with pytest.raises(DataError, match="the content of the input files"):
        made(tmp_path, *ROWS[:2])
    assert contents(first.index_dir) == contents(second.index_dir)


async def test_stopwords_are_a_choice_that_queries_follow(tmp_path: Path):
    assert await titles(made(tmp_path, *ROWS).index_dir, "no and") == []
    files = made(tmp_path, *ROWS, name="every_word", stopwords="none")
    assert await titles(files.index_dir, "no and") == ["", "Title"]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "line 2 is not JSON"),
        ([1], "line 2 is not a document"),
        ({"id": "x"}, "line 2 is not a document"),
        ({"contents": 3}, "line 2 is not a document"),
        ({"text": "a", "title": 3}, "line 2 is not a document"),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_leaves_nothing(tmp_path: Path, row: Any, what: str):
    with pytest.raises(DataError, match=what) as error:
        made(tmp_path, ROWS[0], row, ROWS[1])
    assert error.value.details["line"] == 2
    assert str(error.value.details["file"]).endswith("corpus.jsonl")
    assert not (tmp_path / "index").exists()


def test_a_failed_making_leaves_what_was_there(tmp_path: Path):
    (tmp_path / "index").mkdir()
    with pytest.raises(DataError):
        made(tmp_path, "{")
    assert list((tmp_path / "index").iterdir()) == []
    folder = made(tmp_path, *ROWS).index_dir
    before = contents(folder)
    with pytest.raises(DataError):
        made(tmp_path, "{")
    assert contents(folder) == before


def test_a_corpus_without_words_or_not_there_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no words"):
        made(tmp_path, {"contents": "!"})
    with pytest.raises(DataError, match="no words"):
        made(tmp_path)
    assert not (tmp_path / "index").exists()
    config = SearchIndexConfig(out_dir=tmp_path / "x", corpus=tmp_path / "nowhere")
    with pytest.raises(DataError, match="no file"):
        prepare_search_index(config)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read the corpus"):
        prepare_search_index(SearchIndexConfig(out_dir=tmp_path / "x", corpus=binary))


def test_files_of_another_origin_are_left_alone(tmp_path: Path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index/index.json").write_text("{}")
    with pytest.raises(DataError, match="was not made by"):
        made(tmp_path, *ROWS)


@pytest.mark.parametrize("step", ["_build", "atomic_file", "replace"])
async def test_an_interrupted_index_is_absent_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    folder = tmp_path / "index"

    def cut(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_index.os if step == "replace" else search_index, step, cut)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, *ROWS)
    assert not (folder / "index.json").exists()
    assert made(tmp_path, *ROWS[:1]).made
    assert await titles(folder, "words") == ["Title"]
    assert not (folder / "unfinished").exists()


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.plugins.environment.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="bm25s"):
        made(tmp_path, *ROWS)
