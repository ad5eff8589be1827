"""`agentrl audit` of runs on the real SGLang: in the trainer's process, and as servers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import Trainer
from agentrl.commands.audit.report import run_checks
from agentrl.commands.audit.resample import TurnChoice
from agentrl.commands.audit.saved_run import Check, read_run
from agentrl.config import parse_config
from agentrl.workers.distributed import stop_world
from tests.commands.test_audit import change_request, rewrite
from tests.fakes.runs import tiny_run
from tests.fakes.serve_command import Serving

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def serving(tiny_home: Path, tmp_path: Path) -> Iterator[Serving]:
    """A server of the run's policy."""
    policy = tmp_path / "served/policy"
    policy.parent.mkdir()
    policy.symlink_to(tiny_home / "policy")
    serving = Serving(policy, num=1)
    yield serving
    serving.end()


def train(home: Path, run: Path, engine: dict[str, Any], dtype: str = "auto") -> None:
    """Three steps; those after the second and the third have a checkpoint."""
    scorer = run.parent / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_):\n"
        "    return (sum(map(ord, solution_str)) % 7) / 7\n"
    )
    config = tiny_run(
        home,
        run,
        model__dtype=dtype,
        rollout__engine=engine,
        reward__custom_reward_function={"path": str(scorer)},
        trainer__rollout_data_dir=str(run / "rollouts"),
        trainer__validation_data_dir=str(run / "validation"),
        trainer__compress_rollouts=False,
        trainer__save_freq=2,
        trainer__total_training_steps=3,
    )
    Trainer(parse_config(config)).fit()
    stop_world()


def audit(folder: Path) -> dict[str, Check]:
    """Run every check, and compute the log-probabilities of all turns again."""
    run = read_run(folder)
    checks = run_checks(run, TurnChoice(1000, {0: None, **run.checkpoints}, random.Random(0)))
    stop_world()
    return {one.name: one for one in checks}


def check(folder: Path) -> None:
    """Check that the audit compares everything and finds nothing, until a file is changed."""
    checks = audit(folder)
    assert {name: one.differences for name, one in checks.items()} == {name: [] for name in checks}
    assert all(one.num for one in checks.values()), [(n, one.not_done) for n, one in checks.items()]
    assert checks["resample"].num == 16  # 8 turns of each of the versions 0 and 2
    rewrite(folder, change_request("rollout_log_probs", lambda logs: [logs[0] - 1, *logs[1:]]), 3)
    found = {name for name, one in audit(folder).items() if one.differences}
    assert {"advantages", "resample"} <= found
    assert not found & {"digests", "weights", "order", "template"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_sglang_in_the_process(tiny_home: Path, tmp_path: Path, dtype: str):
    train(tiny_home, tmp_path / "run", {"name": "sglang"}, dtype)
    check(tmp_path / "run")


def test_a_run_on_a_sglang_server(tiny_home: Path, tmp_path: Path, serving: Serving):
    engine = {"name": "sglang_server", "sglang_server": {"addresses": serving.start()}}
    train(tiny_home, tmp_path / "run", engine)
    check(tmp_path / "run")
