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
from agentrl.workers import checkpoint
from agentrl.workers.checkpoint import (
    ModelIdentity,
    RunState,
    Snapshot,
    find_latest,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

IDENTITY = ModelIdentity("Toy", {"w": [2, 3]})
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def filled(step: int, value: float) -> Snapshot:
    weights = {"w": torch.full((2, 3), value)}
    return Snapshot(RunState(step, IDENTITY), weights, {"exp_avg/w": torch.ones(2, 3)})


def write_two(root: Path) -> None:
    for step in (1, 2):
        save_checkpoint(root, filled(step, float(step)), keep=2)


class Killed(BaseException):
    """The process ends here."""


class Deadly:
    """Counts what reaches the disk, and ends the process at one of these moments."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.events: list[str] = []
        self.at = at
        for owner, name in (
            (checkpoint, "save_file"), (checkpoint, "_write_json"), (checkpoint, "flush"),
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
        save_checkpoint(root, filled(step, 9.0), keep=2)
    return deadly.events


@pytest.mark.parametrize("step", [3, 2])
def test_resume_is_exact_run_killed_at_any_moment_of_writing_leaves_whole_checkpoints_alone(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
):
    moments = count_moments(tmp_path / "counted", step, monkeypatch)
    assert len(moments) > 12
    before = filled(2, 2.0).model["w"]
    found = set[float]()
    for at, moment in enumerate(moments, start=1):
        root = tmp_path / str(at)
        write_two(root)
        with monkeypatch.context() as patch:
            Deadly(patch, at)
            with pytest.raises(Killed):
                save_checkpoint(root, filled(step, 9.0), keep=2)
        for path in root.glob("global_step_*"):
            verify_checkpoint(path)
        latest = find_latest(root)
        assert latest is not None, moment
        model = load_checkpoint(latest, IDENTITY).model["w"]
        found.add(float(model[0, 0]))
        assert latest.name == f"global_step_{step}" or torch.equal(model, before), moment
        save_checkpoint(root, filled(4, 4.0), keep=2)
        left = sorted(path.name for path in root.iterdir())
        assert left in (["global_step_3", "global_step_4"], ["global_step_2", "global_step_4"])
    assert found == {2.0, 9.0}


def test_everything_is_on_the_disk_before_the_manifest_and_the_manifest_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events = count_moments(tmp_path / "checkpoints", 3, monkeypatch)
    writing = ".writing-global_step_3"
    manifest = events.index("_write_json manifest.json")
    for name in FILES:
        assert f"flush {name}" in events[:manifest]
    renamed = events.index("rename global_step_3")
    between = events[manifest:renamed]
    assert between.index("flush manifest.json") < between.index(f"flush {writing}")
    dropped = events.index("rename .removed-global_step_1")
    assert "flush checkpoints" in events[renamed:dropped]
    assert events[dropped:] == ["rename .removed-global_step_1", "rmtree .removed-global_step_1"]


@pytest.mark.parametrize("had_new", [False, True])
def test_folder_that_a_killed_run_had_moved_away_is_put_back(tmp_path: Path, had_new: bool):
    write_two(tmp_path)
    (tmp_path / "global_step_2").rename(tmp_path / ".replaced-global_step_2")
    if had_new:
        (tmp_path / ".writing-global_step_2").mkdir()
    assert find_latest(tmp_path) == tmp_path / "global_step_2"
    save_checkpoint(tmp_path, filled(3, 3.0))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step_1", "global_step_2", "global_step_3"]


def test_old_checkpoint_that_cannot_be_removed_is_reported_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write_two(tmp_path)

    def refuse(place: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    monkeypatch.setattr(checkpoint, "remove_folder", refuse)
    with caplog.at_level(logging.WARNING):
        assert save_checkpoint(tmp_path, filled(3, 3.0), keep=2).is_dir()
    assert "global_step_1 cannot be removed" in caplog.text
