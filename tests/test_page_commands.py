"""Blocks of commands outside the tutorials run as printed, on short runs of the quick start.

Blocks that need a network, an account, a GPU or another program are only parsed
(tests/test_code_blocks.py): `agentrl push`, `agentrl prepare gsm8k`, tau-bench, SGLang, the stages
of a GPU, and run files of verl with `...` in them. `.ci/run` runs those of README.md.
"""

import os
import re
import runpy
import select
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.pages import blocks_of
from tests.fakes.runs import ROOT, run_agentrl, spawn_agentrl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORT = (
    "prepare.arithmetic={num_train: 64, num_val: 16, num_demos: 2000}",
    "prepare.sft.steps=10", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4",
    "rollout.n=2", "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1",
)  # fmt: skip
"""Keys that make a run of the quick start short."""
START_S = 120.0
"""Seconds until a server prints its address."""


def commands_of(page: str, line: str) -> list[list[str]]:
    """The commands of the one block of a page that contains a line."""
    (text,) = (b.text for b in blocks_of(page) if b.language in ("sh", "bash") and line in b.text)
    lines = text.replace("\\\n", " ").splitlines()
    return [words for one in lines if (words := shlex.split(one, comments=True))]


def run(capsys: Any, words: list[str], *changes: str) -> str:
    program, *arguments = words
    assert program == "agentrl", words
    code, out, err = run_agentrl(capsys, *arguments, *changes)
    assert code == 0, f"{words}\n{out}\n{err}"
    return out + err


def serve(words: list[str], folder: Path) -> None:
    """Start a server, wait for its address, and end it with Ctrl-C."""
    server = spawn_agentrl(*words[1:], cwd=folder, environment={"PYTHONPATH": str(ROOT)})
    assert server.stdout is not None
    try:
        end, said = time.monotonic() + START_S, ""
        while not re.search(r"http://\S+:\d+", said):
            ready, _, _ = select.select([server.stdout], [], [], max(0, end - time.monotonic()))
            assert ready, f"{words} printed no address: {said}"
            line = server.stdout.readline()
            assert line, f"{words} ended: {server.communicate()}"
            said += line
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
        assert server.returncode in (0, 130), err
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the commands run, as in a clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture
def trained(clone: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Both runs of docs/viewer.md; `run.yaml` is the recorded configuration of the first."""
    if not (clone / "run.yaml").exists():
        *training, _ = commands_of("viewer.md", "trainer.default_local_dir=runs/b")
        assert len(training) == 2
        for words in training:
            run(capsys, words, *SHORT)
        shutil.copy(clone / "runs/a/starts/0001/config.yaml", clone / "run.yaml")
    return clone


def test_the_viewer_s_commands_run(trained: Path, capsys: pytest.CaptureFixture[str]):
    commands = commands_of("viewer.md", "agentrl view runs/gsm8k")
    assert len(commands) == 5
    (trained / "runs/gsm8k").symlink_to(trained / "runs/a")
    for words in commands:
        if not {"--export", "--terminal"} & set(words):
            serve(words, trained)
        else:
            run(capsys, ["1" if word == "40" else word for word in words])
    assert (trained / "pages/index.html").is_file()


def test_the_recorded_configuration_runs_in_another_folder(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    said = run(capsys, ["agentrl", "rollout", str(trained / "run.yaml"), "--num", "1"])
    assert "calculator" in said


def test_the_gateway_s_command_runs(trained: Path):
    (words,) = commands_of("gateway.md", "agentrl gateway")
    serve(["0" if word == "8400" else word for word in words], trained)


def test_the_doctor_s_command_runs(trained: Path, capsys: pytest.CaptureFixture[str]):
    (words,) = commands_of("doctor.md", "agentrl doctor")
    assert words.pop() == "rollout.engine.name=sglang"  # tests/doctor has that engine
    assert "FAIL" not in run(capsys, words)


def test_the_tutorial_s_commands_run(trained: Path, capsys: pytest.CaptureFixture[str]):
    commands = commands_of("tutorial.md", "agentrl config check")
    assert [words[1] for words in commands] == [
        "config", "rollout", "rollout", "gateway", "sft", "prepare",
    ]  # fmt: skip
    for words in commands[:-1]:  # the last one loads GSM8K from the network
        if words[1] == "gateway":
            serve(words, trained)
        else:
            run(capsys, words)


def test_the_run_with_compaction_trains(clone: Path, capsys: pytest.CaptureFixture[str]):
    script, training = commands_of("segments.md", "examples/compaction/pages.py")
    assert script[0] == "python"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", script[1:])
        runpy.run_path(script[1], run_name="__main__")
    short = ("prepare.sft.steps=10", "trainer.total_training_steps=1", "data.train_batch_size=8",
             "rollout.n=2", "trainer.test_freq=-1")  # fmt: skip
    assert "1/1" in run(capsys, training, *short)
