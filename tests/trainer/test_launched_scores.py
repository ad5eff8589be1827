"""Scores that begin while others still roll out, in whole runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import Trainer
from agentrl.config import parse_config
from tests.fakes.run_differences import differences
from tests.fakes.runs import tiny_run

pytestmark = pytest.mark.usefixtures("alone")

SCORER = """
import asyncio, random

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(random.uniform(0.0, 0.02))
    return {"score": len(solution_str) % 7, "length": len(solution_str)}

def fail_some(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 3 == 0:
        return float("nan")
    return 1.0
"""

Run = Callable[..., Trainer]


@pytest.fixture
def run(tiny_home: Path, tmp_path: Path) -> Run:
    """Run a tiny configuration to its end, its scorer in a file beside it."""
    file = tmp_path / "score.py"
    file.write_text(SCORER)

    def fit(folder: str, **changes: Any) -> Trainer:
        custom = {"path": str(file), "name": changes.pop("scorer", "compute_score")}
        if "reward__functions" not in changes:
            changes["reward__custom_reward_function"] = custom
        content = tiny_run(tiny_home, tmp_path / folder / "run", **changes)
        trainer = Trainer(parse_config(content))
        trainer.fit()
        return trainer

    return fit


def lines_of(trainer: Trainer) -> list[dict[str, Any]]:
    text = (trainer.folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_resume_is_exact_when_a_score_begins_changes_nothing_of_a_deterministic_run(run: Run):
    changes = {"rollout__deterministic": True, "trainer__val_before_train": False}
    early = run("early", **changes)
    late = run("late", reward__launch_reward_fn_async=False, **changes)
    weights = [load_file(one.folder / "trained/model.safetensors") for one in (early, late)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    found = differences(early.folder, late.folder)
    assert not [one for one in found if "metrics" in one or "rollouts" in one]


def test_each_function_of_several_and_the_seconds_of_scores_are_logged(run: Run, tmp_path: Path):
    path = str(tmp_path / "score.py")
    trainer = run(
        "several",
        reward__functions=[
            {"name": "gsm8k", "weight": 1.0},
            {"name": "odd", "path": path, "weight": 0.5},
        ],
        algorithm__adv_estimator="gdpo",
        algorithm__gdpo_reward_keys=["gsm8k", "odd"],
    )
    last = lines_of(trainer)[-1]
    assert {f"reward/{name}/mean" for name in ("gsm8k", "odd")} <= last.keys()
    mean = last["reward/gsm8k/mean"] + 0.5 * last["reward/odd/mean"]
    assert last["rollout/reward/mean"] == pytest.approx(mean)
    assert 0.0 < last["reward/seconds/mean"] <= last["reward/seconds/max"] < 5.0
    assert last["timing_s/reward"] >= 0.0


def test_failures_are_data_scores_that_fail_early_are_masked_and_the_run_goes_on(run: Run):
    trainer = run("failing", scorer="fail_some", rollout__failure__max_failed_frac=1.0)
    last = lines_of(trainer)[-1]
    assert last["training/global_step"] == 2
    assert "rollout/failures/reward" in last
