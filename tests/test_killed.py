"""Runs that are killed with `kill -9` and started again: what they leave is what one run leaves."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from agentrl.config.schema.prepare import SftConfig
from agentrl.config.schema.training import OptimConfig
from agentrl.data.files import read_rows
from agentrl.tools import initialize_tools_from_config
from agentrl.workers.distributed import start_world, stop_world
from agentrl.workers.sft import run_sft
from tests.fakes.forker import ForkedProgram
from tests.fakes.killed_runs import KILL_POINTS, SCORER, ChildRun, Mark, RunForker
from tests.fakes.run_differences import differences
from tests.fakes.runs import (
    CALCULATOR,
    ROOT,
    read_lines,
    tiny_run,
    write_jsonl,
    write_yaml,
)

STEPS_PER_EPOCH = 4
NUM_STEPS = 3 * STEPS_PER_EPOCH
FIRST_EPOCH, EPOCHS_END, AFTER = (1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11, 12)
SAVE_FREQ = {"roll_out": 3, "update_actor": 4, "save_checkpoint": 1}
"""Resumed within an epoch and across its end; exactly at its end; at every step."""


@dataclass(frozen=True)
class Home:
    """What the runs begin from: data whose rows meet a simulated user, a policy, a scorer."""

    folder: Path
    policy: Path

    def run(self, folder: Path, **changes: Any) -> dict[str, Any]:
        """A run's configuration: deterministic, with all that a step may depend on."""
        common = {
            "data__train_files": [str(self.folder / "train.jsonl")],
            "data__val_files": {"arithmetic": str(self.folder / "val.jsonl")},
            "data__train_batch_size": 24 // STEPS_PER_EPOCH,
            "data__max_prompt_length": 300,
            "data__max_response_length": 96,
            "model__path": str(self.policy),
            "rollout__deterministic": True,
            "rollout__multi_turn__max_tokens_per_turn": 32,
            "rollout__multi_turn__max_tool_response_length": 32,
            "rollout__multi_turn__interaction_config_path": str(
                ROOT / "configs/interaction_config/gsm8k_interaction_config.yaml"
            ),
            "actor__ppo_mini_batch_size": 3,
            "actor__shuffle": True,
            "actor__use_kl_loss": True,
            "actor__optim": {"lr": 1e-3, "lr_scheduler": "cosine", "lr_warmup_steps": 2},
            "reward__custom_reward_function": {"path": str(self.folder / "score.py")},
            "trainer__total_training_steps": NUM_STEPS,
            "trainer__test_freq": 2,
            "trainer__max_ckpt_to_keep": 2,
            "trainer__rollout_data_dir": str(folder / "rollouts"),
            "trainer__validation_data_dir": str(folder / "validation"),
        }
        return tiny_run(self.folder, folder, **(common | changes))


@pytest.fixture(scope="module")
def home(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Rows that name their simulated user, a scorer whose rewards differ, the untrained policy."""
    folder = tmp_path_factory.mktemp("killed")
    for name in ("train", "val"):
        rows = list(read_rows(tiny_home / f"data/{name}.parquet"))
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            row["extra_info"]["interaction_kwargs"] = {"name": "gsm8k", "ground_truth": truth}
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "score.py").write_text(SCORER)
    return Home(folder, tiny_home / "policy")


@pytest.fixture(scope="module")
def warm_home(home: Home, tiny_home: Path) -> Home:
    """The same with a policy that knows how to call the calculator."""
    demos = read_rows(tiny_home / "data/demos.jsonl")
    calls = [row for row in demos if any("tool_calls" in message for message in row["messages"])]
    config = SftConfig(
        model_path=str(home.policy),
        train_file=write_jsonl(home.folder / "calls.jsonl", calls),
        out_dir=home.folder / "warm",
        steps=250,
        batch_size=8,
        optim=OptimConfig(name="muon", lr=0.012, muon_lr=0.024, lr_scheduler="cosine"),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shown = [tool.tool_schema for tool in initialize_tools_from_config(CALCULATOR)]
    run_sft(config, start_world("cpu", timeout_s=60), tools=shown)
    stop_world()
    torch.set_num_threads(threads)
    return Home(home.folder, config.out_dir)


@pytest.fixture(scope="module")
def forker() -> Iterator[RunForker]:
    with RunForker() as forker:
        yield forker


@dataclass
class KilledRun:
    """One run that may be killed several times."""

    forker: RunForker
    run: dict[str, Any]
    folder: Path
    children: list[ChildRun] = field(default_factory=list[ChildRun])

    def run_child(self) -> ChildRun:
        """Start or restart it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.children.append(self.forker.start(self.run, self.folder.with_suffix(".log")))
        return self.children[-1]

    def finish(self) -> ChildRun:
        """Let it run to its end."""
        child = self.run_child()
        assert child.wait() == 0, self.log_tail()
        return child

    def kill_inside(self, point: str, step: int, delay: float) -> bool:
        """Kill it `delay` seconds after it entered a point; return whether it was still in it."""
        mark, child = Mark("enter", point, step), self.run_child()
        assert child.wait_for(mark), self.log_tail()
        child.kill_after(delay)
        assert child.wait() == -9, self.log_tail()
        return child.is_inside(mark)

    def newest_checkpoint(self) -> int:
        names = [path.name for path in self.folder.glob("checkpoints/global_step_*")]
        return max([int(name.rpartition("_")[2]) for name in names], default=0)

    def log_tail(self) -> str:
        return self.folder.with_suffix(".log").read_text()[-3000:]


def usual_seconds(child: ChildRun, point: str) -> float:
    """Return the median time that a run spent in a point."""
    times = dict(zip(child.marks, child.times, strict=True))
    entered = [mark for mark in child.marks if mark[:2] == ("enter", point)]
    return median(times[mark._replace(event="leave")] - times[mark] for mark in entered)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", KILL_POINTS)
def test_resume_is_exact_run_killed_ten_times_is_the_run_that_was_never_killed(
    warm_home: Home, forker: RunForker, tmp_path: Path, point: str
):
    def make_run(name: str) -> KilledRun:
        run = warm_home.run(tmp_path / name, trainer__save_freq=SAVE_FREQ[point])
        return KilledRun(forker, run, tmp_path / name)

    whole, killed = make_run("whole"), make_run("killed")
    seconds = usual_seconds(whole.finish(), point)
    draw = random.Random(f"instants of {point}")
    steps = sorted(
        draw.choices(FIRST_EPOCH, k=3) + draw.choices(EPOCHS_END, k=4) + draw.choices(AFTER, k=3)
    )
    hits: list[int] = []
    half_written = 0
    for step in steps:
        for attempt in range(10):
            reached = max(step, killed.newest_checkpoint() + 1)
            # An instant that came too late costs a step: the next comes earlier, the last in time.
            sooner = 8 if reached == NUM_STEPS else 2**attempt
            if killed.kill_inside(point, reached, draw.uniform(0, seconds / sooner)):
                hits.append(reached)
                half_written += any(killed.folder.glob("checkpoints/.writing-*"))
                break
    assert len(hits) == 10, "instants that came too late"
    assert all(set(hits) & set(steps) for steps in (FIRST_EPOCH, EPOCHS_END, AFTER))
    assert half_written >= 3 or point != "save_checkpoint"
    killed.finish()
    assert differences(whole.folder, killed.folder) == []
    lines = read_lines(whole.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert sum(line["rollout/tool_calls/ok"] for line in lines[1:]) > 1
    assert sum(line["rollout/user_turns/mean"] for line in lines[1:]) > 1
    assert all(line["actor/grad_norm"] > 0 for line in lines[1:])


@pytest.mark.slow
def test_resume_is_exact_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been(
    warm_home: Home, forker: RunForker, tmp_path: Path
):
    def make_run(name: str) -> KilledRun:
        run = warm_home.run(tmp_path / name, trainer__save_freq=STEPS_PER_EPOCH)
        return KilledRun(forker, run, tmp_path / name)

    whole, stopped = make_run("whole"), make_run("stopped")
    seconds = usual_seconds(whole.finish(), "roll_out")
    draw = random.Random("instants of SIGTERM")
    for step, point in ((1, "roll_out"), (3, "update_actor"), (4, "validate"), (6, "roll_out")):
        child = stopped.run_child()
        assert child.wait_for(Mark("enter", point, step)), stopped.log_tail()
        child.kill_after(draw.uniform(0, seconds), signal.SIGTERM)
        assert child.wait() == 1, stopped.log_tail()
        assert not any(stopped.folder.glob("checkpoints/.*"))
    stopped.finish()
    for run in (whole, stopped):  # each stop has saved a step, so other early ones are kept
        earlier = sorted(run.folder.glob("checkpoints/global_step_*"), key=os.path.getmtime)[:-1]
        for checkpoint in earlier:
            shutil.rmtree(checkpoint)
    assert differences(whole.folder, stopped.folder) == []


# The command itself, from nothing to its end.


def whole_run_file(folder: Path) -> Path:
    """A run file that makes its data, its policy and its warm-up first."""
    run = tiny_run(
        folder,
        folder / "run",
        data__max_prompt_length=300,
        model__path=str(folder / "warm"),
        rollout__deterministic=True,
        trainer__total_training_steps=4,
        trainer__save_freq=1,
        prepare={
            "arithmetic": {
                "out_dir": str(folder / "data"), "num_train": 24, "num_val": 6, "num_demos": 60,
            },
            "tiny_policy": {
                "out_dir": str(folder / "policy"), "corpus": str(folder / "data/demos.jsonl"),
                "vocab_size": 400, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1,
            },
            "sft": {
                "model_path": str(folder / "policy"),
                "train_file": str(folder / "data/demos.jsonl"),
                "out_dir": str(folder / "warm"),
                "steps": 60, "batch_size": 8, "optim": {"lr": 0.01},
            },
        },
    )  # fmt: skip
    return write_yaml(folder / "run.yaml", run)


def kill_command(run_file: Path, is_time: Callable[[], bool], delay: float) -> None:
    """Run the command, and kill it a moment after the time has come."""
    process = ForkedProgram("agentrl", "train", str(run_file), environment=os.environ)
    try:
        while not is_time():
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        time.sleep(delay)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -9


def finish_command(run_file: Path) -> None:
    """Run the command to its end."""
    process = ForkedProgram("agentrl", "train", str(run_file), environment=os.environ)
    output = process.communicate(timeout=250)
    assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_command_that_is_resumed_leaves_what_one_run_leaves(
    tmp_path: Path,
):
    # At the same place, one after the other: a configuration's digest knows its paths.
    whole, killed = tmp_path / "whole", tmp_path / "run"
    draw = random.Random("instants of the command")
    finish_command(whole_run_file(killed))
    killed.rename(whole)
    run_file = whole_run_file(killed)
    for mark, delay in (
        ("data", 0.02),
        ("policy/manifest.json", 0.1),
        ("warm/manifest.json", 1.0),
        ("run/metrics.jsonl", 0.5),
        ("run/checkpoints/global_step_2", 0.3),
    ):
        kill_command(run_file, (killed / mark).exists, draw.uniform(0, delay))
    finish_command(run_file)
    for part in ("data", "policy", "warm", "run"):
        assert differences(whole / part, killed / part) == [], part
