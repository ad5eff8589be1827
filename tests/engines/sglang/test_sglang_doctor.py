"""`agentrl doctor` on the real SGLang, each in a process of its own as a user runs it."""

from pathlib import Path

import psutil
import pytest

from tests.fakes.runs import Told, spawn_agentrl, tiny_run, write_yaml

pytestmark = pytest.mark.sglang


def examine(home: Path, folder: Path, *overrides: str) -> Told:
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
    return Told(process.returncode, out, err)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_healthy_run_on_sglang_passes_and_leaves_nothing(tiny_home: Path, tmp_path: Path):
    told = examine(tiny_home, tmp_path)
    assert told.code == 0, told.out + told.err
    assert "FAIL" not in told.out
    assert "skipped" not in told.out
    assert "sglang" in told.out
    assert told.out.count("nats") == 3


def test_an_sglang_that_computes_otherwise_is_a_fault_with_its_causes(
    tiny_home: Path, tmp_path: Path
):
    other = "rollout.engine.sglang.json_model_override_args='{\"rms_norm_eps\": 10.0}'"
    told = examine(tiny_home, tmp_path, other, "rollout.engine.sglang.dtype=bfloat16")
    assert told.code == 1, told.out + told.err
    assert told.out.count("FAIL") == 3
    assert "the engine in: bfloat16" in told.out
    assert "stale weights" in told.out
