"""What is on the disk when a process ends while it writes a checkpoint."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import atomic_io as folders
from agentrl.workers import checkpoint_writer
from agentrl.workers.checkpoint import ModelIdentity, RunState, open_checkpoint
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import find_latest
from tests.fakes.checkpoints import read_tensors, write_checkpoint

IDENTITY = ModelIdentity("Toy", {"w": [2, 3]})
FILES = ("rank_0.safetensors", "state.json")


def write(root: Path, step: int, value: float, *, keep: int | None = None) -> Path:
    tensors = {"weight/w": torch.full((2, 3), value), "exp_avg/w": torch.ones(2, 3)}
    return write_checkpoint(root, RunState(step, IDENTITY), tensors, keep=keep)


def write_two(root: Path) -> None:
    for step in (1, 2):
        write(root, step, float(step), keep=2)


def latest(root: Path, world: World) -> Path:
    found = find_latest(root, world)
    assert found is not None
    return found.path


class Killed(BaseException):
    """The process ends here."""


class Deadly:
    """Counts what reaches the disk, and ends the process at one of these moments."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.events: list[str] = []
        self.at = at
        for owner, name in (
            (checkpoint_writer, "_write_file"), (checkpoint_writer.os, "fsync"),
            (folders, "flush"), (Path, "rename"), (Path, "mkdir"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))
        patch.setattr(folders.shutil, "rmtree", self._counted("rmtree", self._in_part))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = next((a for a in reversed(args) if isinstance(a, Path)), None)
            self.events.append(f"{name} {place.name if place else ''}")
            if len(self.events) == self.at and name != "rmtree":
                raise Killed
            return function(*args, **kwargs)

        return call

    def _in_part(self, path: Path, *, ignore_errors: bool = False) -> None:
        files = list(path.iterdir()) if path.is_dir() else []
        if len(self.events) == self.at:
            for file in files[:1]:
                file.unlink()
            raise Killed
        for file in files:
            file.unlink()
        if path.is_dir():
            path.rmdir()


def count_moments(root: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    write_two(root)
    with monkeypatch.context() as patch:
        deadly = Deadly(patch)
        write(root, step, 9.0, keep=2)
    return deadly.events


@pytest.mark.parametrize("step", [3, 2])
def test_resume_is_exact_run_killed_at_any_moment_of_writing_leaves_whole_checkpoints_alone(
    world: World, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
):
    moments = count_moments(tmp_path / "counted", step, monkeypatch)
    assert len(moments) > 12
    found = set[float]()
    for at, moment in enumerate(moments, start=1):
        root = tmp_path / str(at)
        write_two(root)
        with monkeypatch.context() as patch:
            Deadly(patch, at)
            with pytest.raises(Killed):
                write(root, step, 9.0, keep=2)
        for path in root.glob("global_step_*"):
            open_checkpoint(path)
        newest = latest(root, world)
        value = float(read_tensors(newest)["weight/w"][0, 0])
        found.add(value)
        assert newest.name == f"global_step_{step}" or value == 2.0, moment
        write(root, 4, 4.0, keep=2)
        left = sorted(path.name for path in root.iterdir())
        assert left in (["global_step_3", "global_step_4"], ["global_step_2", "global_step_4"])
    assert found == {2.0, 9.0}


def test_everything_is_on_the_disk_before_the_manifest_and_the_manifest_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events = count_moments(tmp_path / "checkpoints", 3, monkeypatch)
    writing = ".writing-global_step_3"
    manifest = events.index("_write_file manifest.json")
    for name in FILES:
        written = events.index(f"_write_file {name}")
        assert events[written + 1].startswith("fsync"), "a file is flushed when it is written"
        assert written < manifest
    renamed = events.index("rename global_step_3")
    between = events[manifest:renamed]
    assert between.index("flush manifest.json") < between.index(f"flush {writing}")
    dropped = events.index("rename .removed-global_step_1")
    assert "flush checkpoints" in events[renamed:dropped]
    assert events[dropped:] == ["rename .removed-global_step_1", "rmtree .removed-global_step_1"]


@pytest.mark.parametrize("had_new", [False, True])
def test_folder_that_a_killed_run_had_moved_away_is_put_back(
    world: World, tmp_path: Path, had_new: bool
):
    write_two(tmp_path)
    (tmp_path / "global_step_2").rename(tmp_path / ".replaced-global_step_2")
    if had_new:
        (tmp_path / ".writing-global_step_2").mkdir()
    assert latest(tmp_path, world) == tmp_path / "global_step_2"
    write(tmp_path, 3, 3.0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step_1", "global_step_2", "global_step_3"]


def test_old_checkpoint_that_cannot_be_removed_is_reported_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_two(tmp_path)

    def refuse(place: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    monkeypatch.setattr(checkpoint_writer, "remove_folder", refuse)
    with caplog.at_level(logging.WARNING):
        assert write(tmp_path, 3, 3.0, keep=2).is_dir()
    assert "global_step_1 cannot be removed" in caplog.text
