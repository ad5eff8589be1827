"""`benchmarks/gpu.py`: its stages on a CPU, and its report."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import main, run_here, run_stage, write_report
from benchmarks.gpu_stages import STAGES

STEPS = [name for name in STAGES if not name.startswith("quick_start")]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("stage", STEPS)
def test_stage_passes_on_a_cpu(stage: str, tmp_path: Path):
    run_here(stage, "cpu", small=True, out=tmp_path)
    result = json.loads((tmp_path / f"{stage}.json").read_text())
    assert result["status"] == "ok", result
    assert result["figures"]


def test_stage_that_fails_is_reported_with_its_error(tmp_path: Path):
    run_here("head", "no device", small=True, out=tmp_path)
    result = json.loads((tmp_path / "head.json").read_text())
    assert result["status"] == "failed"
    assert "no device" in result["error"]


def test_stage_that_takes_too_long_is_stopped_and_reported(tmp_path: Path):
    late = run_stage("head", "cpu", small=True, out=tmp_path, limit_s=0.2)
    assert late.status == "timeout"
    write_report(tmp_path, [late], "cpu")
    assert "| head | timeout |" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["stages"][0]["status"] == "timeout"


@pytest.mark.slow
def test_command_runs_the_quick_start_and_goes_on(tmp_path: Path):
    options = ["--device", "cpu", "--small", "--out", str(tmp_path)]
    assert main([*options, "--stages", "quick_start,head"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [stage["status"] for stage in report["stages"]] == ["ok", "ok"]
