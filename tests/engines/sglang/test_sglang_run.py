"""Whole runs of the command on the real SGLang: one whose engine dies, one that is told to stop."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.runs import read_lines, spawn_agentrl, tiny_run, write_yaml

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def run(tiny_home: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of more steps than it will make."""
    config = tiny_run(
        tiny_home,
        tmp_path / "run",
        rollout__engine={"name": "sglang"},
        trainer__total_training_steps=5000,
        data__val_files=None,
    )
    with spawn_agentrl("train", write_yaml(tmp_path / "run.yaml", config)) as process:
        yield process
        process.kill()


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num: int) -> None:
    metrics = folder / "run/metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.is_file() or len(read_lines(metrics)) < num:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    assert any("scheduler" in " ".join(child.cmdline()) for child in found)
    return found


def test_killed_engine_ends_the_run_with_a_message_and_the_last_step_saved(
    run: subprocess.Popen[str], tmp_path: Path
):
    wait_for_steps(run, tmp_path, 2)
    children = family(run)
    next(c for c in children if "scheduler" in " ".join(c.cmdline())).kill()
    out, err = run.communicate(timeout=120)
    assert run.returncode not in (0, -signal.SIGQUIT), (out, err)
    assert "a process of SGLang has ended unexpectedly" in out + err
    (saved,) = (tmp_path / "run/checkpoints").glob("global_step_*")
    assert int(saved.name.rpartition("_")[2]) >= 2
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_ctrl_c_in_the_terminal_saves_the_last_step_and_leaves_no_process(
    run: subprocess.Popen[str], tmp_path: Path
):
    wait_for_steps(run, tmp_path, 1)
    children = family(run)
    for process in (*children, psutil.Process(run.pid)):  # as a terminal does it
        process.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 130, (out, err)
    assert "was completed last; the run resumes from" in out
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_ctrl_c_while_sglang_starts_leaves_no_process(run: subprocess.Popen[str]):
    deadline = time.monotonic() + 200
    children: list[psutil.Process] = []
    while not any("spawn_main" in " ".join(child.cmdline()) for child in children):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
        children = psutil.Process(run.pid).children(recursive=True)
    for process in (*children, psutil.Process(run.pid)):  # as a terminal does it
        process.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, (out, err)
    assert "Traceback" not in out + err
    assert not psutil.wait_procs(children, timeout=30)[1]
