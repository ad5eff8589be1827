"""The profiler of chosen steps."""

import gzip
import json
from pathlib import Path

import pytest

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import ConfigError
from agentrl.trainer.tracing.profiler import StepProfiler
from agentrl.workers.distributed import start_world
from tests.fakes.runs import tiny_run

pytestmark = pytest.mark.usefixtures("alone")


def test_only_the_chosen_step_is_profiled_with_its_phases(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = tiny_run(
        tiny_home,
        tmp_path / "run",
        trainer__profiler={"steps": [0, 2, 99], "ranks": [0, 5]},
        trainer__alerts={"rules": [{"metric": "actor/grad_nrm", "above": 1}]},
    )
    summary = Trainer(parse_config(content)).fit()
    notes = [line for line in capsys.readouterr().out.splitlines() if "trainer." in line]
    assert notes == [
        "note: trainer.alerts.rules: 'actor/grad_nrm' is not a metric of agentrl; "
        "did you mean 'actor/grad_norm'?",
        f"note: trainer.profiler.steps: [0, 99] are not profiled; the last step is {summary.steps}",
        "note: trainer.profiler.ranks: [5] are not profiled; the last rank is 0",
    ]
    (file,) = (tmp_path / "run/profiles").iterdir()
    assert file.name == "step_000002_rank_0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    phases = [one["name"] for one in events if one.get("cat") == "user_annotation"]
    assert "sync_weights" in phases
    assert "gen" not in phases, "the rollout is left out"
    assert any(one.get("cat") == "cpu_op" and one["name"] == "aten::mm" for one in events)


def profiler(tmp_path: Path, lines: list[str], **section: object) -> StepProfiler:
    config = TrainerConfig(default_local_dir=tmp_path, profiler=section)  # pyright: ignore
    return StepProfiler(config, start_world("cpu", timeout_s=60), lines.append)


def test_other_ranks_and_moments_are_not_profiled(tmp_path: Path):
    lines: list[str] = []
    for section in ({"steps": [1], "ranks": [1]}, {"steps": [2]}, {}):
        one = profiler(tmp_path, lines, **section)
        one.start(1, before_rollout=True)
        one.start(1, before_rollout=False)
        one.save(1)
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_is_reported(tmp_path: Path):
    (tmp_path / "profiles").write_text("a file where the folder should be")
    lines: list[str] = []
    one = profiler(tmp_path, lines, steps=[1], with_rollout=True)
    one.start(1, before_rollout=True)
    one.start(1, before_rollout=False)
    one.save(1)
    assert len(lines) == 1
    assert lines[0].startswith("note: the profile of step 1 was not written")


def test_cuda_cannot_be_profiled_on_a_cpu(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"trainer\.profiler\.activities"):
        profiler(tmp_path, [], steps=[1], activities=["cuda"])
    profiler(tmp_path, [], activities=["cuda"])
