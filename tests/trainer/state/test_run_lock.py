"""A run's folder belongs to one run at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.trainer.state import run_folder
from agentrl.trainer.state.run_folder import LOCK_FILE, Owner, RunLock
from tests.fakes.runs import tiny_run

HOLDER = """
import sys, time
from pathlib import Path
from agentrl.trainer.state import run_folder
from agentrl.trainer.state.run_folder import RunLock
lock = RunLock(Path(sys.argv[1])).take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def refusal_of(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RunLock(folder).take()
    return caught.value


def test_second_run_is_refused_with_host_process_and_start_of_the_first(
    tmp_path: Path, holder: subprocess.Popen[str]
):
    error = refusal_of(tmp_path)
    assert str(error).startswith(f"another run uses {tmp_path}\n")
    assert error.details["host"] == socket.gethostname()
    assert error.details["process"] == holder.pid
    written = json.loads((tmp_path / LOCK_FILE).read_text())
    assert error.details["started"] == written["started"]
    assert error.details["key"] == "trainer.default_local_dir"


def test_lock_of_a_killed_run_is_taken_over(tmp_path: Path, holder: subprocess.Popen[str]):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_FILE).read_text()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


def test_lock_is_given_back_and_can_be_taken_again(tmp_path: Path):
    for _ in range(2):
        with RunLock(tmp_path):
            refusal_of(tmp_path)
        assert not (tmp_path / LOCK_FILE).read_text()


def test_number_of_a_dead_run_that_another_process_has_now_holds_no_lock(tmp_path: Path):
    parent = replace(Owner.this_process(), process=os.getppid(), process_started=1.0)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(parent)))
    with RunLock(tmp_path):
        pass


def leave_lock_of_another_host(folder: Path) -> Path:
    path = folder / LOCK_FILE
    path.write_text(json.dumps(asdict(replace(Owner.this_process(), host="node-17"))))
    return path


def test_run_that_was_killed_on_another_host_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_folder, "SILENCE_S", 0.1)
    path = leave_lock_of_another_host(tmp_path)
    with RunLock(tmp_path):
        assert json.loads(path.read_text())["process"] == os.getpid()


def test_run_on_another_host_that_touches_its_lock_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = leave_lock_of_another_host(tmp_path)
    monkeypatch.setattr(run_folder, "SILENCE_S", 10.0)
    touch = threading.Timer(0.1, os.utime, [path])
    touch.start()
    error = refusal_of(tmp_path)
    touch.join()
    assert error.details["host"] == "node-17"
    assert json.loads(path.read_text())["host"] == "node-17"


def test_lock_is_touched_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_folder, "TOUCH_S", 0.01)
    path = tmp_path / LOCK_FILE
    with RunLock(tmp_path):
        os.utime(path, (0, 0))
        for _ in range(500):
            if path.stat().st_mtime:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime


def test_lock_of_this_process_is_reported_as_such(tmp_path: Path):
    with RunLock(tmp_path):
        assert str(refusal_of(tmp_path)).startswith("a Trainer of this process uses")


def test_lock_file_that_was_cut_short_is_taken_over(tmp_path: Path):
    (tmp_path / LOCK_FILE).write_text('{"host": "no')
    with RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("alone")
def test_trainer_is_refused_while_another_one_has_its_folder(tiny_home: Path, tmp_path: Path):
    folder = tmp_path / "run"
    config = parse_config(tiny_run(tiny_home, folder))
    with RunLock(folder), pytest.raises(ConfigError, match="uses"):
        Trainer(config)
    assert {path.name for path in folder.iterdir()} == {LOCK_FILE}
    trainer = Trainer(config)
    refusal_of(folder)
    trainer.close()
    with RunLock(folder):
        pass
