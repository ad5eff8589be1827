import json
import tracemalloc
from pathlib import Path

import pytest

from agentrl.atomic_io import atomic_file
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.data.files import read_rows, write_jsonl, write_parquet
from agentrl.data.rows import load_conversations
from agentrl.errors import DataError

ROW = {"prompt": [{"role": "user", "content": "2 + 3?"}], "data_source": "sums"}


def refusal(call, *args) -> DataError:
    with pytest.raises(DataError) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path, rows = tmp_path / f"rows{suffix}", [ROW, ROW | {"data_source": "other"}]
    if suffix == ".parquet":
        write_parquet(path, rows)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    assert read_rows(path) == rows


def test_json_lines_may_be_called_json(tmp_path):
    path = tmp_path / "rows.json"
    write_jsonl(path, [ROW, ROW])
    assert read_rows(path) == [ROW, ROW]


def test_json_keeps_texts_that_look_like_something_else(tmp_path):
    rows = [{"answer": 3}, {"answer": "0012", "when": "2020-01-01"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_reading_parquet_shows_no_progress_and_leaves_no_copy(tmp_path, capfd):
    write_parquet(tmp_path / "rows.parquet", [ROW])
    read_rows(tmp_path / "rows.parquet")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "", "no rows"),
        ("rows.json", "[]", "no rows"),
        ("rows.csv", "a,b", "unknown kind of file"),
        ("rows.jsonl", '{"a": 1}\n\n{"a": }\n', "line 3, column 7"),
        (
            "rows.jsonl",
            '{"a": 1}\n{"a": [\n{"a": 1}\n',
            "line 2, column 8, which begins '{\"a\": ['",
        ),
        ("rows.jsonl", '{"a": 1}\n{"a"\n', "line 2, column 5"),
        ("rows.json", '[{"a": 1},\n{"a": 2}\n\n', "line 2, column 9, which begins '{\"a\": 2}'"),
        ("rows.json", '[{"a": 1},\n {"a" 2}]', "line 2, column 7"),
        ("rows.jsonl", "[1]\n", "not a mapping"),
        ("rows.parquet", "no parquet", "cannot read Parquet"),
        ("rows.jsonl", b"\xff\xfe{}", "cannot read the file"),
    ],
)
def test_a_bad_file_is_reported_with_its_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refusal(read_rows, path)
    assert error.file == path
    assert message in str(error)


def test_a_missing_file_is_reported_with_its_name(tmp_path):
    assert "no file" in str(refusal(read_rows, tmp_path / "none.parquet"))


def write_half(path: Path) -> None:
    with atomic_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [ROW])
    with pytest.raises(TypeError):
        write_jsonl(path, [ROW, {"prompt": object()}])
    assert read_rows(path) == [ROW]
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    assert read_rows(path) == [ROW]


def test_conversations_are_read_with_calls_and_tools(tmp_path: Path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    write_jsonl(
        tmp_path / "c.jsonl",
        [{"messages": messages, "tools": [tool]}, {"messages": json.dumps(messages)}],
    )
    first, second = load_conversations(tmp_path / "c.jsonl")
    assert first.messages[0].tool_calls is not None
    assert first.messages[0].tool_calls[0].function.arguments == {"x": 1}
    assert first.tools is not None
    assert first.tools[0].to_template() == tool
    assert second.messages == first.messages
    assert second.tools is None


def test_a_schema_written_as_json_keeps_its_nulls(tmp_path):
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"default": None}}},
        },
    }
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": json.dumps([tool])}
    write_parquet(tmp_path / "c.parquet", [row])
    (conversation,) = load_conversations(tmp_path / "c.parquet")
    assert conversation.tools is not None
    assert conversation.tools[0].function.parameters == tool["function"]["parameters"]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"messages": []},
        {"messages": "no json"},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]},
    ],
)
def test_an_invalid_conversation_is_reported_with_its_row(tmp_path, row):
    good = {"messages": [{"role": "user", "content": "x"}]}
    write_jsonl(tmp_path / "c.jsonl", [good, row])
    assert refusal(load_conversations, tmp_path / "c.jsonl").row == 1


def test_an_empty_list_of_files_is_an_error():
    assert "no data files" in str(refusal(load_prompts, [], DataConfig()))


def test_of_parquet_the_first_rows_are_read_alone(tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "n": i} for i in range(5000)]
    file = tmp_path / "rows.parquet"
    write_parquet(file, rows)
    assert read_rows(file, 3) == read_rows(file)[:3] == rows[:3]
    peak = {}
    for max_rows in (3, None):
        tracemalloc.start()
        read_rows(file, max_rows)
        peak[max_rows] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak[3] < peak[None] / 4


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path, name: str):
    file = tmp_path / name
    file.write_text("[" * 200_000 if name.endswith("json") else '{"a":' * 200_000)
    with pytest.raises(DataError, match="nested too deeply"):
        read_rows(file)
