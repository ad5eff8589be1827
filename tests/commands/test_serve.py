"""`agentrl serve` before anything starts: what it refuses. Real servers: tests/sglang."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runs import run_agentrl, tiny_run, write_yaml

Capture = pytest.CaptureFixture[str]


def write_run(folder: Path, **changes: Any) -> Path:
    return write_yaml(folder / "run.yaml", tiny_run(folder, folder / "run", **changes))


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: Capture):
    output = run_agentrl(capsys, "serve", write_run(tmp_path))
    assert output.code == 2
    assert f"no folder {tmp_path}/policy" in output.err
    assert "key: model.path" in output.err


def test_a_model_that_the_run_file_makes_names_the_command_that_makes_it(
    tmp_path: Path, capsys: Capture
):
    maker = {"out_dir": str(tmp_path / "policy"), "corpus": str(tmp_path / "demos.jsonl")}
    run_file = write_run(tmp_path, prepare__tiny_policy=maker)
    output = run_agentrl(capsys, "serve", run_file)
    assert output.code == 2
    assert f"{tmp_path}/policy is not made yet" in output.err
    assert f"agentrl rollout {run_file}" in output.err


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_error_names_the_extra(tiny_home: Path, tmp_path: Path, capsys: Capture):
    run_file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, tmp_path / "run"))
    output = run_agentrl(capsys, "serve", run_file)
    assert output.code == 2
    assert "pip install 'sglang==" in output.err
