"""Ctrl-C and SIGTERM: what a stopped run releases and saves, and where it resumes."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import agentrl.workers.checkpoint_writer
from agentrl.trainer.checkpointer import Checkpointer
from agentrl.trainer.metrics.sinks import read_metrics
from agentrl.trainer.state.summary import Summary
from agentrl.workers.optim import PolicyOptimizer
from tests.fakes.fault_runs import SCORER, Train, assert_same_run, make_run, saved_steps
from tests.fakes.forker import ForkedProgram
from tests.fakes.runs import read_lines, run_agentrl, tiny_run, write_yaml

pytestmark = pytest.mark.usefixtures("alone")


def arm(place: str, plugin_folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have the process signalled once, at one place of a run's second step."""
    if place in ("rollout", "validation"):
        (plugin_folder / "armed").write_text("train-2" if place == "rollout" else "val-rows-2")
        return
    owner: Any = PolicyOptimizer if place == "update" else agentrl.workers.checkpoint_writer
    name = "step" if place == "update" else "_write_file"
    real, calls = getattr(owner, name), iter(range(100))
    # A checkpoint has three files: the fourth call writes the weights of the second.
    when = 2 if place == "update" else 3

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == when:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    patch.setattr(owner, name, signalled)


@pytest.mark.parametrize(
    ("place", "saved"),
    [
        ("rollout", ["global_step_1"]),
        ("update", ["global_step_2"]),
        ("validation", ["global_step_2"]),
        pytest.param("checkpoint", ["global_step_1", "global_step_2"], marks=pytest.mark.slow),
    ],
)
def test_stopped_run_saves_its_last_step_and_goes_on_as_if_never_stopped(
    train: Train, tmp_path: Path, plugin_folder: Path, whole: Path, place: str, saved: list[str]
):
    with pytest.MonkeyPatch.context() as patch:
        arm(place, plugin_folder, patch)
        output = train(trainer__save_freq=1 if place == "checkpoint" else -1)
    assert output.code == 130, output
    last = f"{tmp_path}/run/checkpoints/{saved[-1]}"
    assert output.out.endswith(
        f"interrupted: step {saved[-1][-1]} was completed last; the run resumes from {last}\n"
    )
    assert "Traceback" not in output.out + output.err
    assert not list(plugin_folder.glob("created-*")), "every tool was released"
    assert saved_steps(tmp_path / "run") == saved
    *_, logged = read_metrics(tmp_path / "run/metrics.jsonl")
    assert f"global_step_{logged.step}" == saved[-1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (plugin_folder / "fired").unlink(missing_ok=True)
    output = train()
    assert output.code == 0, output
    assert f"resumed from {tmp_path}/run/checkpoints/{saved[-1]}" in output.out
    assert_same_run(tmp_path / "run", whole)


def test_signal_while_the_end_is_written_ends_a_whole_run_as_a_stopped_one(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = Checkpointer.export

    def signalled(self: Checkpointer, step: int, summary: Summary) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step, summary)

    monkeypatch.setattr(Checkpointer, "export", signalled)
    output = train(trainer__total_training_steps=1, data__val_files=None)
    assert output.code == 130, output
    assert "interrupted: step 1 was completed last" in output.out.splitlines()[-1]
    assert saved_steps(tmp_path / "run") == ["global_step_1"]
    assert (tmp_path / "run/trained/config.json").is_file()
    assert json.loads((tmp_path / "run/summary.json").read_text())["exported"]


def test_run_stopped_before_its_first_step_is_over_leaves_no_checkpoint(
    train: Train, tmp_path: Path, plugin_folder: Path
):
    (plugin_folder / "armed").write_text("train-1")
    output = train()
    assert output.code == 130
    assert output.out.endswith("interrupted: no step was completed\n")
    assert not (tmp_path / "run/checkpoints").exists()
    assert not list(plugin_folder.glob("created-*"))


def test_rollout_command_is_stopped_with_its_tools_released(
    tiny_home: Path, plugin_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (plugin_folder / "armed").write_text("train-0")
    file = write_yaml(tmp_path / "run.yaml", make_run(tiny_home, plugin_folder, tmp_path / "run"))
    output = run_agentrl(capsys, "rollout", file, "--num", 3)
    assert output.code == 130, output
    assert "Traceback" not in output.err
    assert not list(plugin_folder.glob("created-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_preparation_is_repeated(
    tiny_home: Path,
    tmp_path: Path,
    number: int,
    capsys: pytest.CaptureFixture[str],
):
    content = tiny_run(tiny_home, tmp_path / "run", trainer__val_only=True)
    content["prepare"] = {"arithmetic": {"out_dir": f"{tmp_path}/data", "num_demos": 5}}
    file = write_yaml(tmp_path / "run.yaml", content)

    def stopped(*_: Any) -> None:
        os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.quickstart.arithmetic.write_jsonl", stopped)
        output = run_agentrl(capsys, "train", file)
    assert output.code == 130, output
    assert output.out.endswith("interrupted\n")
    assert "Traceback" not in output.err
    output = run_agentrl(capsys, "train", file)
    assert output.code == 0, output
    assert f"problems: {tmp_path}/data, made again: it was not finished\n" in output.out


@pytest.mark.slow
def test_second_ctrl_c_leaves_at_once(tiny_home: Path, plugin_folder: Path, tmp_path: Path):
    (plugin_folder / "clinging").touch()
    (plugin_folder / "armed").write_text("train-1")
    content = make_run(
        tiny_home, plugin_folder, tmp_path / "run", data__val_files=None, trainer__test_freq=None
    )
    file = write_yaml(tmp_path / "run.yaml", content)
    process = ForkedProgram("agentrl", "train", str(file), environment=os.environ)
    try:
        wait_for(plugin_folder / "fired", process)
        time.sleep(2)
        assert process.poll() is None, "the tools cling"
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert time.monotonic() - asked < 10
    assert err.endswith("exiting immediately: nothing more was saved\n")
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("interrupted_ranks", [(0, 1), (1,)])
def test_two_ranks_stop_together_and_save(
    tiny_home: Path,
    plugin_folder: Path,
    tmp_path: Path,
    whole: Path,
    interrupted_ranks: tuple[int, ...],
):
    scorer = plugin_folder / "score.py"
    # Only while a step's rewards are awaited is it sure to be between two steps on every rank.
    scorer.write_text(
        SCORER.replace("    return", f"    wait({str(tmp_path)!r})\n    return")
        + "\nimport time\nfrom pathlib import Path\n\n\ndef wait(folder):\n"
        "    folder = Path(folder)\n"
        "    if (folder / 'run/metrics.jsonl').exists() and '\"step\": 1' in "
        "(folder / 'run/metrics.jsonl').read_text():\n"
        "        (folder / 'second').touch()\n        time.sleep(0.5)\n"
    )
    content = make_run(
        tiny_home, plugin_folder, tmp_path / "run", data__val_files=None, trainer__test_freq=None
    )
    file = write_yaml(tmp_path / "run.yaml", content)
    ranks = spawn_ranks(file)
    try:
        wait_for(tmp_path / "second", ranks[0])
        for rank in interrupted_ranks:
            ranks[rank].send_signal(signal.SIGTERM)
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130], outputs
    assert saved_steps(tmp_path / "run") == ["global_step_1"], outputs
    scorer.write_text(SCORER)
    ranks = spawn_ranks(file)
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    steps = [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert steps == [1, 2, 3]


def spawn_ranks(file: Path) -> list[ForkedProgram]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [ForkedProgram("agentrl", "train", str(file), environment=one) for one in own]


def wait_for(file: Path, process: ForkedProgram, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{file} never came"
        time.sleep(0.05)
