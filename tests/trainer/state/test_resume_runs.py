"""From what a run may go on, with which date, and that it goes on as if it had never stopped."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl import Trainer
from agentrl.config import RunConfig, parse_config
from agentrl.errors import CheckpointError
from agentrl.trainer.state.resume import START_FILE, check_origin, policy_origin, start_date
from agentrl.workers import checkpoint_writer
from agentrl.workers.checkpoint import ModelIdentity, RunState
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.killed_runs import SCORER
from tests.fakes.run_differences import differences
from tests.fakes.runs import read_lines, tiny_run
from tests.fakes.stores import download, memory_store


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "policy").mkdir()
    return parse_config(
        {
            "data": {"train_files": ["rows.jsonl"]},
            "model": {"path": str(tmp_path / "policy")},
            "trainer": {"default_local_dir": str(tmp_path / "run")},
        }
    )


@pytest.fixture
def world() -> World:
    return start_world("cpu", timeout_s=60)


def write_first_checkpoint(config: RunConfig) -> Path:
    state = RunState(step=1, identity=ModelIdentity("Tiny", {}))
    root = config.trainer.default_local_dir / "checkpoints"
    return write_checkpoint(root, state, {"weight/weight": torch.zeros(2)})


def test_policy_that_is_made_again_has_another_origin(config: RunConfig) -> None:
    manifest = Path(config.model.path) / "manifest.json"
    manifest.write_text(json.dumps({"steps": 30}))
    first = policy_origin(config)
    assert policy_origin(config) == first
    manifest.write_text(json.dumps({"steps": 1000}))
    assert policy_origin(config) != first


def test_policy_without_a_manifest_is_known_by_its_weights(config: RunConfig) -> None:
    weights = Path(config.model.path) / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, weights)
    first = policy_origin(config)
    save_file({"weight": torch.zeros(3)}, weights)
    assert policy_origin(config) != first


def test_checkpoint_of_a_run_from_another_policy_is_refused(config: RunConfig) -> None:
    path = Path("checkpoints/global_step_2")
    check_origin(policy_origin(config), config, path)
    check_origin("", config, path)  # written before origins were
    with pytest.raises(CheckpointError, match="global_step_2 is of a run that began from another"):
        check_origin("of another", config, path)


def test_resumed_run_keeps_the_date_on_which_it_began(config: RunConfig, world: World) -> None:
    began = datetime.now() - timedelta(days=3)
    path = config.trainer.default_local_dir / START_FILE
    path.parent.mkdir()
    path.write_text(began.isoformat())
    write_first_checkpoint(config)
    assert start_date(config, world) == began


def test_run_without_a_checkpoint_begins_today(config: RunConfig, world: World) -> None:
    path = config.trainer.default_local_dir / START_FILE
    path.parent.mkdir()
    path.write_text((datetime.now() - timedelta(days=3)).isoformat())
    now = start_date(config, world)
    assert datetime.now() - now < timedelta(minutes=1)
    assert datetime.fromisoformat(path.read_text().strip()) == now


# Whole runs.


class Killed(BaseException):
    """The process ends here."""


class KilledTrainer(Trainer):
    """A trainer whose process ends behind one of its stations, before anybody hears of it."""

    ends_at: tuple[str, int] | None = None

    def roll_out(self, prompts: Any, plan: Any) -> Any:
        return self._maybe_end("roll_out", super().roll_out(prompts, plan))

    def update_actor(self, batch: Any) -> Any:
        return self._maybe_end("update_actor", super().update_actor(batch))

    def _maybe_end(self, point: str, result: Any) -> Any:
        if self.ends_at == (point, self.step):
            raise Killed
        return result


Train = Callable[..., None]


@pytest.fixture(scope="module")
def train(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Run a small deterministic configuration, to its end or to where its process ends."""
    scorer = tmp_path_factory.mktemp("scorer") / "score.py"
    scorer.write_text(SCORER)

    def run(folder: Path, ends_at: tuple[str, int] | None = None, **changes: Any) -> None:
        common = {
            "rollout__deterministic": True,
            "reward__custom_reward_function": {"path": str(scorer)},
            "actor__shuffle": True,
            "actor__optim": {"lr": 1e-2, "lr_scheduler": "cosine"},
            "trainer__test_freq": 2,
            "trainer__save_freq": 1,
            "trainer__rollout_data_dir": str(folder / "rollouts"),
        }
        trainer = KilledTrainer(parse_config(tiny_run(tiny_home, folder, **(common | changes))))
        trainer.ends_at = ends_at
        trainer.fit()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    stop_world()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two steps leave behind; only to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


def test_resume_is_exact_after_a_kill_at_any_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # 14 rows fill three batches: step 4 is the second epoch's first.
    steps = {"trainer__total_training_steps": 4, "trainer__save_freq": 2}
    train(tmp_path / "whole", **steps)
    run = tmp_path / "killed"
    with pytest.raises(Killed):
        train(run, ("roll_out", 1), **steps)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "Manifest", _end)
        with pytest.raises(Killed):
            train(run, **steps)
    assert (run / "checkpoints/.writing-global_step_2").is_dir()
    with pytest.raises(Killed):
        train(run, ("update_actor", 4), **steps)
    train(run, **steps)
    assert differences(tmp_path / "whole", run) == []
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def _end(*_: object) -> None:
    raise Killed


@pytest.mark.slow
def test_resume_is_exact_on_another_machine_from_a_store(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, steps = memory_store(), {"trainer__total_training_steps": 3}
    train(tmp_path / "whole", **steps)
    remote = steps | {"trainer__default_remote_dir": store.url}
    with pytest.raises(Killed):
        train(tmp_path / "first", ("update_actor", 2), **remote)
    began = (store / START_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "Manifest", _end)
        with pytest.raises(Killed):
            train(tmp_path / "second", **remote)
    assert {folder.name for folder in (store / "checkpoints").folders()} == {
        "global_step_1", "global_step_2",  # without a manifest
    }  # fmt: skip
    train(tmp_path / "third", **remote)
    assert (store / START_FILE).read_bytes() == began, "templates write the date of the run"
    saved = download(store, tmp_path / "saved")
    # The card shows the metrics that this machine has: those of the last steps.
    for name, expected in (("checkpoints", []), ("trained", ["README.md: other bytes"])):
        assert differences(tmp_path / "whole" / name, saved / name) == expected
        assert name == "trained" or not (tmp_path / "third" / name).exists()
    assert [line["step"] for line in read_lines(tmp_path / "third/metrics.jsonl")] == [2, 3]
    summary = json.loads((tmp_path / "third/summary.json").read_text())
    assert summary["exported"] == f"{store}/trained"
    assert summary["checkpoint"] == f"{store}/checkpoints/global_step_3"
    elsewhere = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": f"{store}/checkpoints/global_step_2",
    }
    train(tmp_path / "local", **steps | elsewhere)
    name = "checkpoints/global_step_3"
    assert differences(tmp_path / "whole" / name, tmp_path / "local" / name) == []


def refuse_pickles(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle is read")

    for owner, name in (
        (torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"),
    ):  # fmt: skip
        patch.setattr(owner, name, refuse)


def test_damaged_checkpoint_is_passed_over_and_its_step_is_taken_again(
    train: Train,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    weights = run / "checkpoints/global_step_2/rank_0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (run / ".summary.json.4321.draft").write_text("half of")
    with monkeypatch.context() as patch:
        refuse_pickles(patch)
        train(run)
    assert "global_step_2 is damaged: rank_0.safetensors is missing or was changed" in caplog.text
    output = " ".join(capsys.readouterr().out.split())
    assert f"resumed from {run}/checkpoints/global_step_1 at step 1" in output
    aside = run / "checkpoints/superseded/global_step_2"
    assert f"skipped a damaged checkpoint, which is now {aside}" in output
    shutil.rmtree(aside.parent)
    assert differences(finished, run) == []
    assert {path.suffix for path in run.rglob("global_step_*/*")} == {".json", ".safetensors"}


def test_run_that_starts_again_leaves_no_output_of_the_earlier_one_in_its_folder(
    train: Train, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    train(run, trainer__resume_mode="disable", trainer__total_training_steps=1)
    assert (
        "moved files of an earlier run: "
        f"2 checkpoints -> {run}/checkpoints/superseded, "
        f"4 rollout files -> {run}/rollouts/superseded, "
        f"metrics.jsonl -> {run}/metrics.1.jsonl\n"
    ) in capsys.readouterr().out
    assert {path.name for path in (run / "rollouts").glob("step_*")} == {
        "step_000001.jsonl.zst", "step_000001.tokens.parquet",
    }  # fmt: skip
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1]


def test_run_with_damaged_checkpoints_alone_is_refused_and_leaves_all_as_it_was(
    train: Train, finished: Path, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for path in run.glob("checkpoints/*/manifest.json"):
        path.unlink()
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match="can be used: global_step_2, global_step_1"):
        train(run)
    assert sorted(run.rglob("*")) == before
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
