"""Names and lines of rollout files, plain and compressed."""

from pathlib import Path

import pandas
import pytest

from agentrl.errors import DataError
from agentrl.trainer.rollouts import line_files
from agentrl.trainer.rollouts.line_files import (
    LineReader,
    find_later_files,
    find_rollout_files,
    other_form,
    read_range,
    write_lines,
)

LINES = [f'{{"number": {number}, "text": "{"é" * (number % 70)}"}}\n' for number in range(300)]
NAMES = {True: "step_000001.jsonl.zst", False: "step_000001.jsonl"}


@pytest.fixture(params=[True, False], ids=["compressed", "plain"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(line_files, "_FRAME_BYTES", 1000)
    path = tmp_path / NAMES[request.param]
    write_lines(path, LINES, compressed=request.param)
    return path


def test_lines_are_read_as_they_were_written(path: Path):
    with LineReader(path) as file:
        assert [line.decode() for line in file] == LINES


def test_every_line_is_read_by_itself_from_its_frame(path: Path):
    offset = 0
    with LineReader(path) as file:
        lines = list(file)
    is_compressed = path.suffix == ".zst"
    assert (len(file.frames) > 10) == is_compressed
    for line in lines:
        assert read_range(path, offset, len(line), file.frames) == line
        offset += len(line)


def test_lines_over_the_boundary_of_frames_are_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(line_files, "_FRAME_BYTES", 1)
    path = tmp_path / "step_000001.jsonl.zst"
    write_lines(path, ["a", "b\n", "c", "d\n"], compressed=True)  # each is a frame
    with LineReader(path) as file:
        assert list(file) == [b"ab\n", b"cd\n"]
    assert read_range(path, 0, 3, file.frames) == b"ab\n"
    assert read_range(path, 3, 3, file.frames) == b"cd\n"


def test_pandas_reads_a_file_in_one_line(path: Path):
    assert pandas.read_json(path, lines=True).number.tolist() == list(range(300))


def test_a_file_without_lines_is_read(tmp_path: Path):
    for name in NAMES.values():
        write_lines(tmp_path / name, [], compressed=name.endswith(".zst"))
        with LineReader(tmp_path / name) as file:
            assert list(file) == []


def test_lone_surrogates_are_written_as_their_escapes(path: Path):
    write_lines(path, ['"\ud800"\n'], compressed=path.suffix == ".zst")
    with LineReader(path) as file:
        assert file.read() == b'"\\ud800"\n'


@pytest.mark.parametrize(("start", "end"), [(0, -3), (5, None)], ids=["cut", "no frame"])
def test_a_damaged_compressed_file_is_an_error_with_its_path(
    tmp_path: Path, start: int, end: int | None
):
    path = tmp_path / "step_000001.jsonl.zst"
    write_lines(path, LINES, compressed=True)
    path.write_bytes(path.read_bytes()[start:end])
    with LineReader(path) as file, pytest.raises(DataError, match="damaged") as caught:
        file.read()
    assert str(path) in str(caught.value)


def test_files_are_found_by_step_and_kind(tmp_path: Path):
    names = (
        "step_000002.jsonl.zst", "step_000001.jsonl", "val_a_b_000002.jsonl",
        "val_000012.jsonl.zst",
        "step_000002.tokens.parquet", "digests.jsonl", "step_x.jsonl", "step_000003.jsonl.gz",
    )  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    found = find_rollout_files(tmp_path)
    assert [(one.label, one.kind, one.step) for one in found] == [
        ("step_000001", "step", 1), ("step_000002", "step", 2),
        ("val_000012", "val", 12), ("val_a_b_000002", "val_a_b", 2),
    ]  # fmt: skip
    assert [one.step for one in find_rollout_files(tmp_path, "step")] == [1, 2]
    assert [path.name for path in find_later_files(tmp_path, 1)] == [
        "step_000002.jsonl.zst", "step_000002.tokens.parquet",
        "val_000012.jsonl.zst", "val_a_b_000002.jsonl",
    ]  # fmt: skip
    assert find_rollout_files(tmp_path / "none") == []


def test_the_other_form_of_a_name_and_back():
    for compressed, name in NAMES.items():
        assert other_form(Path(name)).name == NAMES[not compressed]
