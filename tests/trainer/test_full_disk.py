"""Full disks and folders that cannot be written: what stands, what goes on, what is told."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from agentrl.atomic_io import naming_path
from agentrl.config.schema.run import TrainerConfig
from agentrl.config.schema.training import OptimConfig
from agentrl.errors import ConfigError
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.setup.preflight import check_disk_space, checkpoint_bytes
from agentrl.workers import checkpoint_writer
from tests.fakes.fault_runs import (
    Train,
    assert_refused,
    assert_same_run,
    limit_file_size,
    make_run,
    saved_steps,
)
from tests.fakes.runs import (
    run_agentrl,
    tiny_run,
    write_yaml,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.slow
def test_full_disk_at_a_checkpoint_keeps_the_one_before(train: Train, tmp_path: Path, whole: Path):
    assert train(trainer__total_training_steps=1).code == 0
    output = train(limit=100_000, trainer__save_freq=1)
    assert_refused(output, "cannot write a checkpoint", f"{tmp_path}/run/checkpoints/global_step_2")
    assert saved_steps(tmp_path / "run") == ["global_step_1"], "nothing half"
    assert train().code == 0
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_full_disk_at_a_line_of_figures_saves_the_step_and_logs_it_later(
    train: Train, tmp_path: Path, whole: Path
):
    metrics = tmp_path / "run/metrics.jsonl"
    assert train(trainer__total_training_steps=1).code == 0
    long_line = json.dumps({"step": 0} | {f"padding/{number}": 0.0 for number in range(30_000)})
    metrics.write_text(long_line + "\n" + metrics.read_text())
    output = train(limit=metrics.stat().st_size + 100)
    assert_refused(output, "cannot write: File too large", str(metrics))
    assert not metrics.read_text().endswith("\n"), "the line is half there"
    assert saved_steps(tmp_path / "run") == ["global_step_1", "global_step_2"]
    assert train().code == 0
    metrics.write_text(metrics.read_text().removeprefix(long_line + "\n"))
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_full_disk_at_the_export_keeps_the_checkpoint(train: Train, tmp_path: Path):
    assert train(trainer__total_training_steps=1).code == 0
    exported = load_file(tmp_path / "run/trained/model.safetensors")
    output = train(limit=50_000, trainer__total_training_steps=1)
    assert_refused(output, "cannot write the model", f"{tmp_path}/run/trained")
    again = load_file(tmp_path / "run/trained/model.safetensors")
    assert all(torch.equal(again[name], exported[name]) for name in exported)
    assert train().code == 0


def test_policy_is_exported_if_memory_runs_out_at_the_last_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint_writer, "_copy_pieces", run_out)
    output = train(trainer__total_training_steps=1, trainer__val_before_train=False)
    assert_refused(output, "cannot write a checkpoint: no memory for a copy of")
    assert not list((tmp_path / "run/checkpoints").glob("global_step_*"))
    assert load_file(tmp_path / "run/trained/model.safetensors")


def test_what_is_only_for_looking_at_ends_no_run(train: Train, tmp_path: Path):
    folder = tmp_path / "run"
    output = train(
        limit=20_000,  # the record of the run fits; its rollouts and the picture do not
        rollout__val_kwargs={"n": 10},
        trainer__val_only=True,
        trainer__plot=True,
        trainer__logger=["console", "jsonl", "tensorboard"],
        trainer__validation_data_dir=str(folder / "val"),
        trainer__compress_rollouts=False,
    )
    assert output.code == 0, output
    begins = (
        f"warning: rollouts not written: [Errno 27] cannot write: File too large: '{folder}/val"
    )
    assert output.out.count(begins) == 1
    assert "warning: rollouts of 1 of 1 steps were not written: File too large" in output.out
    assert "the learning curve not written" in output.out
    assert "Traceback" not in output.err
    assert (folder / "summary.json").is_file()
    assert not list((folder / "val").iterdir())


def test_rollouts_that_cannot_be_written_are_reported_once_and_counted_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    logger = RunLogger(TrainerConfig(default_local_dir=tmp_path))
    for step in range(8):
        for _ in range(2):  # rollouts of training and of validation
            with logger.ignoring_write_errors("rollouts", step):
                if step:
                    raise OSError(errno.ENOSPC, "cannot write: No space left on device", "a")
        with logger.ignoring_write_errors("tokens", step):
            pass
    logger.close()
    logger.close()
    assert capsys.readouterr().out.splitlines() == [
        "warning: rollouts not written: [Errno 28] cannot write: No space left on device: 'a'",
        "warning: rollouts of 7 of 8 steps were not written: No space left on device",
    ]


def test_full_disk_while_preparing_names_the_folder_and_leaves_nothing_for_made(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    problems = ("prepare", "arithmetic", tmp_path / "data", "--num-train", 300, "--num-demos", 5)
    with limit_file_size(2_000):
        assert_refused(run_agentrl(capsys, *problems), f"{tmp_path}/data/train.parquet")
    assert "made" in run_agentrl(capsys, *problems).out
    run = tiny_run(tiny_home, tmp_path / "run")
    run["prepare"] = {
        "tiny_policy": {
            "out_dir": f"{tmp_path}/policy",
            "corpus": f"{tiny_home}/data/demos.jsonl",
            "vocab_size": 300,
            "hidden_size": 8,
            "num_heads": 1,
            "num_kv_heads": 1,
            "intermediate_size": 8,
        },
    }
    file = write_yaml(tmp_path / "run.yaml", run)
    with limit_file_size(4_000):
        assert_refused(run_agentrl(capsys, "rollout", file), f"{tmp_path}/policy")
    assert not json.loads((tmp_path / "policy/manifest.json").read_text())["complete"]


def test_library_that_tells_a_full_disk_in_its_own_way_is_heard(tiny_home: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_home / "policy")
    with (
        limit_file_size(8_000),
        pytest.raises(OSError, match="cannot write: File too large") as raised,
        naming_path(tmp_path / "policy"),
    ):
        tokenizer.save_pretrained(tmp_path / "policy")
    assert raised.value.filename == str(tmp_path / "policy")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_free_space_lets_it_continue(
    train: Train, tmp_path: Path, whole: Path
):
    with mounted(tmp_path / "run", kilobytes=600):
        output = train(trainer__save_freq=1)
        # While the checkpoint is written, a line of figures may meet the full disk first.
        assert_refused(output, "cannot write", "No space left")
        assert "global_step_2" in output.err + output.out
        assert saved_steps(tmp_path / "run") == ["global_step_1"]
        remount(tmp_path / "run", kilobytes=8_000)
        assert train().code == 0
        assert_same_run(tmp_path / "run", whole)


@contextmanager
def mounted(folder: Path, *, kilobytes: int) -> Iterator[None]:
    """Mount a small disk; the test is left out where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        # Lazily: tensors that were read may still be mapped from there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, *, kilobytes: int) -> None:
    options = f"remount,size={kilobytes}k"
    subprocess.run(["mount", "-o", options, str(folder)], check=True)


def test_run_with_a_checkpoint_larger_than_the_disk_is_refused(tmp_path: Path):
    check_disk_space(tmp_path, 1000)
    with pytest.raises(ConfigError, match=r"a checkpoint takes 12000000000\.00 GB") as raised:
        check_disk_space(tmp_path, checkpoint_bytes(10**18, OptimConfig()))
    assert raised.value.details["key"] == "trainer.default_local_dir"


# A folder that cannot be written.


@pytest.mark.parametrize(
    "key", ["trainer.default_local_dir", "trainer.rollout_data_dir",
            "trainer.validation_data_dir", "data.cache_dir", "prepare.arithmetic.out_dir"]
)  # fmt: skip
def test_folder_that_cannot_be_written_is_reported_before_the_model_loads(
    train: Train, tmp_path: Path, key: str
):
    (tmp_path / "file").write_text("")
    output = train(**{key.replace(".", "__"): str(tmp_path / "file/below")})
    assert_refused(output, "cannot write", f"{tmp_path}/file/below", f"key: {key}")
    assert "Qwen2ForCausalLM" not in output.out


def test_rollouts_that_cannot_be_saved_are_reported_before_the_model_loads(
    tiny_home: Path, plugin_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_yaml(tmp_path / "run.yaml", make_run(tiny_home, plugin_folder, tmp_path / "run"))
    output = run_agentrl(capsys, "rollout", file, "--out", tmp_path)
    assert_refused(output, f"{tmp_path} is a folder", "--out")
    output = run_agentrl(capsys, "rollout", file, "--out", "/proc/rollouts/one.jsonl")
    assert_refused(output, "cannot write to /proc/rollouts", "--out")
