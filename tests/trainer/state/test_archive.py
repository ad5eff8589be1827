"""What a run sets aside that takes another course in a used folder."""

from pathlib import Path
from typing import Any

from agentrl.config.schema.run import DataConfig, ModelConfig, RunConfig
from agentrl.trainer.state.resume import archive_earlier_outputs, checkpoint_folder


def make_config(folder: Path, **settings: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(train_files=[Path("train.parquet")]),
        model=ModelConfig(path="policy"),
        trainer={"default_local_dir": folder, **settings},  # pyright: ignore
    )


def put_checkpoints(config: RunConfig, *steps: int) -> Path:
    root = checkpoint_folder(config)
    for step in steps:
        (root / f"global_step_{step}").mkdir(parents=True)
    return root


def put_files(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(name)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_run_that_starts_again_archives_every_checkpoint(tmp_path: Path):
    config = make_config(tmp_path, resume_mode="disable")
    root = put_checkpoints(config, 20, 40)
    moved = archive_earlier_outputs(config, None, 0)
    assert [path.name for path in moved.checkpoints] == ["global_step_40", "global_step_20"]
    assert names(root) == ["superseded"]


def test_run_from_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path: Path):
    config = make_config(tmp_path, resume_mode="resume_path")
    root = put_checkpoints(config, 20, 40, 60)
    archive_earlier_outputs(config, root / "global_step_40", 40)
    assert names(root) == ["global_step_20", "global_step_40", "superseded"]


def test_run_from_another_runs_checkpoint_sets_all_of_its_own_folder_aside(tmp_path: Path):
    config = make_config(tmp_path / "here", resume_mode="resume_path")
    root = put_checkpoints(config, 20, 60)
    other = put_checkpoints(make_config(tmp_path / "there"), 40)
    archive_earlier_outputs(config, other / "global_step_40", 40)
    assert names(root) == ["superseded"]
    assert names(other) == ["global_step_40"]


def test_run_that_only_validates_moves_no_checkpoint_and_no_rollouts(tmp_path: Path):
    rollouts = put_files(tmp_path / "rollouts", "step_000001.jsonl")
    config = make_config(tmp_path, resume_mode="disable", val_only=True, rollout_data_dir=rollouts)
    root = put_checkpoints(config, 20)
    assert list(archive_earlier_outputs(config, None, 0).describe()) == []
    assert names(root) == ["global_step_20"]
    assert names(rollouts) == ["step_000001.jsonl"]


def test_run_that_starts_again_reports_the_archive_in_one_line(tmp_path: Path):
    rollouts = put_files(
        tmp_path / "rollouts",
        "step_000001.jsonl", "step_000012.jsonl", "val_000000.jsonl", "val_a_b_000012.jsonl",
        "step_notes.jsonl", "notes.txt",
    )  # fmt: skip
    put_files(tmp_path / "skipped", "step_000003.jsonl")
    put_files(tmp_path, "metrics.jsonl")
    config = make_config(
        tmp_path, resume_mode="disable", rollout_data_dir=rollouts, validation_data_dir=rollouts
    )
    put_checkpoints(config, 20, 40)
    [message] = archive_earlier_outputs(config, None, 0).describe()
    assert message == (
        "moved files of an earlier run: "
        f"2 checkpoints -> {tmp_path}/checkpoints/superseded, "
        f"4 rollout files -> {rollouts}/superseded, "
        f"1 rollout file -> {tmp_path}/skipped/superseded, "
        f"metrics.jsonl -> {tmp_path}/metrics.1.jsonl"
    )
    assert names(rollouts) == ["notes.txt", "step_notes.jsonl", "superseded"]
    assert (rollouts / "superseded/val_a_b_000012.jsonl").read_text() == "val_a_b_000012.jsonl"


def test_run_from_an_earlier_checkpoint_keeps_the_rollouts_before_it(tmp_path: Path):
    rollouts = put_files(tmp_path / "rollouts", "step_000020.jsonl", "step_000021.jsonl")
    config = make_config(tmp_path, resume_mode="resume_path", rollout_data_dir=rollouts)
    root = put_checkpoints(config, 20)
    archive_earlier_outputs(config, root / "global_step_20", 20)
    assert names(rollouts) == ["step_000020.jsonl", "superseded"]
    put_files(rollouts, "step_000021.jsonl")
    archive_earlier_outputs(config, root / "global_step_20", 20)
    assert names(rollouts / "superseded") == ["step_000021.jsonl", "step_000021.jsonl.1"]


def test_run_that_goes_on_by_itself_sets_only_what_is_damaged_aside(tmp_path: Path):
    rollouts = put_files(tmp_path / "rollouts", "step_000021.jsonl")
    config = make_config(tmp_path, rollout_data_dir=rollouts)
    root = put_checkpoints(config, 20, 40)
    [message] = archive_earlier_outputs(config, root / "global_step_20", 20).describe()
    aside = root / "superseded/global_step_40"
    assert message == f"skipped a damaged checkpoint, which is now {aside}"
    assert aside.is_dir()
    assert names(rollouts) == ["step_000021.jsonl"]
