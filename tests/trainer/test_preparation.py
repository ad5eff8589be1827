"""What a run makes first: once, by the content of what it is made of."""

import shutil
from datetime import datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config import RunConfig, parse_config
from agentrl.trainer.journal import Journal
from agentrl.trainer.preparation import prepare_run
from agentrl.trainer.resume import policy_origin
from agentrl.training.distributed import World, start_world

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}


@pytest.fixture
def world() -> World:
    return start_world("cpu", timeout_s=60)


def config_in(folder: Path, **sizes: int) -> RunConfig:
    demos = str(folder / "data/demos.jsonl")
    policy = {"out_dir": str(folder / "policy"), "corpus": demos} | SIZES | sizes
    warm_up = {
        "model_path": policy["out_dir"],
        "train_file": demos,
        "out_dir": str(folder / "warm"),
        "steps": 1,
        "batch_size": 2,
    }
    problems = {"out_dir": str(folder / "data"), "num_train": 4, "num_val": 4, "num_demos": 20}
    return parse_config(
        {
            "prepare": {"arithmetic": problems, "tiny_policy": policy, "sft": warm_up},
            "data": {"train_files": [str(folder / "data/train.parquet")]},
            "model": {"path": warm_up["out_dir"]},
            "trainer": {"default_local_dir": str(folder)},
        }
    )


def prepare(config: RunConfig, world: World) -> list[str]:
    """What it tells, one line for each of problems, policy and warm-up (its steps left out)."""
    told = StringIO()
    journal = Journal(config.trainer, console=Console(file=told))
    prepare_run(config, world, journal, [], now=datetime(2031, 1, 1))
    return [line for line in told.getvalue().splitlines() if "warm-up step" not in line]


def test_folder_that_was_moved_holds_what_it_held_before(world: World, tmp_path: Path):
    first = config_in(tmp_path / "one")
    prepare(first, world)
    shutil.move(tmp_path / "one", tmp_path / "two")
    second = config_in(tmp_path / "two")
    assert all("made before" in line for line in prepare(second, world))
    (tmp_path / "alias").symlink_to(tmp_path / "two")
    respelled = config_in(tmp_path / "alias")
    assert all("made before" in line for line in prepare(respelled, world))
    assert policy_origin(second) == policy_origin(respelled)


def test_another_size_makes_policy_and_warm_up_anew_and_says_so(world: World, tmp_path: Path):
    prepare(config_in(tmp_path), world)
    problems, policy, *warm_up = prepare(config_in(tmp_path, num_layers=1), world)
    assert "made before" in problems
    assert "made anew" in policy
    assert "made anew" in warm_up[0]
