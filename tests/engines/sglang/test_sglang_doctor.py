"""`agentrl doctor` on the real SGLang, each in a process of its own as a user runs it."""

from pathlib import Path

import psutil
import pytest

from tests.fakes.runs import CommandOutput, spawn_agentrl, tiny_run, write_yaml

pytestmark = pytest.mark.sglang


def examine(home: Path, folder: Path, *overrides: str) -> CommandOutput:
    """Run the doctor on a small run; no process may outlive it."""
    file = write_yaml(folder / "run.yaml", tiny_run(home, folder / "run"))
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "2000"}
    engine = "rollout.engine.name=sglang"
    process = spawn_agentrl("doctor", file, engine, *overrides, environment=environment)
    try:
        out, err = process.communicate(timeout=240)
        group = [child.pid for child in psutil.process_iter() if str(file) in _command(child)]
    finally:
        process.kill()
    assert group == []
    assert list(folder.iterdir()) == [file]
    return CommandOutput(process.returncode, out, err)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_healthy_run_on_sglang_passes_and_leaves_nothing(tiny_home: Path, tmp_path: Path):
    output = examine(tiny_home, tmp_path)
    assert output.code == 0, output.out + output.err
    assert "FAIL" not in output.out
    assert "skipped" not in output.out
    assert "sglang" in output.out
    assert output.out.count("nats") == 3


def test_an_sglang_that_computes_otherwise_is_a_fault_with_its_causes(
    tiny_home: Path, tmp_path: Path
):
    other = "rollout.engine.sglang.json_model_override_args='{\"rms_norm_eps\": 10.0}'"
    output = examine(tiny_home, tmp_path, other, "rollout.engine.sglang.dtype=bfloat16")
    assert output.code == 1, output.out + output.err
    assert output.out.count("FAIL") == 3
    assert "the engine in: bfloat16" in output.out
    assert "stale weights" in output.out
