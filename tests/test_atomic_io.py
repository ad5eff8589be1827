import os
from pathlib import Path

import pytest

from agentrl import atomic_io as folders
from agentrl.atomic_io import (
    atomic_file,
    atomic_folder,
    make_folder,
    remove_drafts,
    restore_replaced,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(place: Path, content: str) -> None:
    with atomic_folder(place) as aside:
        (aside / "file").write_text(content)


def test_block_that_raises_leaves_what_was_there(tmp_path: Path):
    fill(tmp_path / "place", "first")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "place") as aside:
        aside.mkdir()
    assert (tmp_path / "place/file").read_text() == "first"
    assert names(tmp_path) == ["place"]


def test_move_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path / "place", "first")
    rename = Path.rename

    def refuse_new(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing-"):
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="no"):
        fill(tmp_path / "place", "second")
    assert (tmp_path / "place/file").read_text() == "first"
    assert names(tmp_path) == ["place"]


def test_an_old_folder_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fill(tmp_path / "place", "first")
    remove = folders.shutil.rmtree

    def refuse_old(path: Path, **options: bool) -> None:
        if path.name.startswith(".replaced-"):
            if options.get("ignore_errors"):
                return
            raise OSError("busy")
        remove(path, **options)

    monkeypatch.setattr(folders.shutil, "rmtree", refuse_old)
    fill(tmp_path / "place", "second")
    assert (tmp_path / "place/file").read_text() == "second"
    assert "place is complete, but its old version may still exist: busy" in caplog.text


def test_folder_moved_away_by_a_killed_process_is_there_for_the_next_to_take_along(tmp_path: Path):
    place = tmp_path / "place"
    fill(place, "first")
    place.rename(tmp_path / ".replaced-place")
    with atomic_folder(place) as aside:
        assert (place / "file").read_text() == "first"
        (aside / "file").write_text("second")
    assert (place / "file").read_text() == "second"
    assert names(tmp_path) == ["place"]


def test_what_was_replaced_already_does_not_come_back(tmp_path: Path):
    fill(tmp_path / "place", "second")
    fill(tmp_path / ".replaced-place", "first")
    restore_replaced(tmp_path / "place")
    assert (tmp_path / "place/file").read_text() == "second"


def test_files_of_inner_folders_and_new_outer_ones_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[str] = []
    monkeypatch.setattr(folders, "flush", lambda path: flushed.append(path.name))
    with atomic_folder(tmp_path / "outer/inner/place") as aside:
        (aside / "sub").mkdir()
        (aside / "sub/file").write_text("x")
    assert {tmp_path.name, "outer", "inner", "sub", "file"} <= set(flushed)
    flushed.clear()
    make_folder(tmp_path / "outer")
    assert flushed == []


def test_drafts_of_killed_processes_go_and_nothing_else(tmp_path: Path):
    with atomic_file(tmp_path / "kept.json") as draft:
        draft.write_text("{}")
    for name in (f".kept.json.{os.getpid()}.draft", ".hidden", "my.draft", ".my.draft"):
        (tmp_path / name).touch()
    remove_drafts(tmp_path)
    remove_drafts(tmp_path / "nowhere")
    assert names(tmp_path) == [".hidden", ".my.draft", "kept.json", "my.draft"]
