"""A whole run on two ranks, as torchrun starts them, beside the same run on one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl import Trainer, load_config
from agentrl.workers.distributed import stop_world
from tests.fakes.checkpoints import read_tensors, read_weights
from tests.fakes.runs import read_lines, spawn_agentrl, tiny_run, write_yaml
from tests.fakes.torchrun import ROOT, RankOutput, free_port, ranks_of

SCORES = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ.get("RANK") == "1" and (HERE / "armed").exists():
        (HERE / "reached").touch()
        {deed}
    return float(len(solution_str) % 5)
"""
CLOCKS = ("timing_s/", "perf/", "weight_sync/")
ONE_STEP = "trainer.total_training_steps=1"
LAST = "checkpoints/global_step_2"


class Runs(NamedTuple):
    """The folders of the same run on one rank and on two, and what the two printed."""

    alone: Path
    together: Path
    outputs: list[RankOutput]
    file: Path


def run_file(home: Path, folder: Path, *, deed: str = "pass", **changes: Any) -> Path:
    """Two steps of five groups of three, which no two ranks can share evenly.

    Args:
        home: With data and policy.
        folder: Of the files and the run.
        deed: What the scorer of the second rank does, once `armed` lies beside it.
        **changes: Of the run file.
    """
    (folder / "score.py").write_text(SCORES.format(deed=deed))
    run = tiny_run(
        home,
        folder / "run",
        **{
            "data__train_batch_size": 5,
            "rollout__n": 3,
            "rollout__deterministic": True,
            "actor__ppo_mini_batch_size": None,
            "reward__custom_reward_function": {"path": f"{folder}/score.py"},
            "trainer__val_before_train": False,
            "trainer__save_freq": 1,
            "trainer__collective_timeout_s": 60,
        }
        | changes,
    )
    return write_yaml(folder / "run.yaml", run)


def changes_for(folder: Path) -> list[str]:
    return [
        f"trainer.default_local_dir={folder}",
        f"trainer.rollout_data_dir={folder}/rollouts",
        f"trainer.validation_data_dir={folder}/rollouts",
    ]


def train_on_two_ranks(file: Path, *changes: str) -> list[RankOutput]:
    with ranks_of("agentrl", "train", str(file), *changes) as ranks:
        return [rank.wait() for rank in ranks]


def train_alone(file: Path, *changes: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Trainer(load_config(file, changes)).fit()
    stop_world()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runs(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    file = run_file(tiny_home, folder, trainer__val_before_train=True, data__val_batch_size=3)
    alone, together = folder / "alone", folder / "together"
    with ranks_of("agentrl", "train", str(file), *changes_for(together)) as ranks:
        train_alone(file, *changes_for(alone))
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    return Runs(alone, together, outputs, file)


@pytest.mark.slow
def test_layout_is_invisible_two_ranks_log_the_figures_of_one(runs: Runs):
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (runs.alone, runs.together))
    assert [line["step"] for line in two] == [line["step"] for line in one] == [0, 1, 2]
    for of_one, of_two in zip(one, two, strict=True):
        assert of_one.keys() == of_two.keys() - {"perf/idle/ranks_frac"}, "one rank waits for none"
        names = [name for name in of_one if not name.startswith(CLOCKS) and "seconds" not in name]
        assert {name: of_two[name] for name in names} == pytest.approx(
            {name: of_one[name] for name in names}, rel=1e-5, abs=1e-6
        )
    assert one[1]["actor/pg_loss"] != 0
    assert one[1]["rollout/num_requests"] == 15


@pytest.mark.slow
def test_layout_is_invisible_two_ranks_that_share_each_sequence_log_the_figures_of_one(
    runs: Runs, tmp_path: Path
):
    changes = [*changes_for(tmp_path), "actor.ulysses_sequence_parallel_size=2"]
    outputs = train_on_two_ranks(runs.file, *changes)
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (runs.alone, tmp_path))
    for of_one, of_two in zip(one, two, strict=True):
        names = [name for name in of_one if not name.startswith(CLOCKS) and "seconds" not in name]
        assert {name: of_two[name] for name in names} == pytest.approx(
            {name: of_one[name] for name in names}, rel=1e-5, abs=1e-6
        )


@pytest.mark.slow
def test_two_ranks_sample_and_save_what_one_does(runs: Runs):
    for name in ("step_000001", "step_000002", "val_arithmetic_000000", "val_arithmetic_000002"):
        one, two = (
            [line["request"] for line in read_lines(folder / f"rollouts/{name}.jsonl.zst")]
            for folder in (runs.alone, runs.together)
        )
        assert len(one) == len(two) > 3
        for of_one, of_two in zip(one, two, strict=True):
            assert of_one["request_id"] == of_two["request_id"], "in the order of the batch"
            assert of_one["response_ids"] == of_two["response_ids"]
            assert of_one["reward"] == of_two["reward"]


@pytest.mark.slow
def test_two_ranks_end_with_the_weights_of_one(runs: Runs):
    folders = (runs.alone, runs.together)
    trained = [load_file(folder / "trained/model.safetensors") for folder in folders]
    saved = [read_weights(folder / "checkpoints/global_step_2") for folder in folders]
    for one, two in (trained, saved):
        assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5) for name in one)


@pytest.mark.slow
def test_one_of_two_ranks_speaks_and_writes(runs: Runs):
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    slices = {f"checkpoints/global_step_{step}/rank_1.safetensors" for step in (1, 2)}
    assert files(runs.together) == files(runs.alone) | slices
    main, other = runs.outputs
    assert main.out.count("2 steps in") == main.out.count("on cpu x 2") == 1
    assert other.out == ""
    assert not [line for line in other.err.splitlines() if "it/s" not in line]


@pytest.mark.slow
def test_layout_is_invisible_to_a_run_with_a_critic_that_resumes_on_another_number_of_ranks(
    tiny_home: Path, tmp_path: Path
):
    file = run_file(
        tiny_home, tmp_path, algorithm__adv_estimator="gae", algorithm__lam=0.9,
        critic__optim__lr=1e-3,
    )  # fmt: skip
    names = ("alone", "together", "one_then_two", "two_then_one")
    alone, together, one_then_two, two_then_one = (tmp_path / name for name in names)
    train_alone(file, *changes_for(alone))
    train_alone(file, *changes_for(one_then_two), ONE_STEP)
    for folder, *rest in ((together,), (one_then_two,), (two_then_one, ONE_STEP)):
        outputs = train_on_two_ranks(file, *changes_for(folder), *rest)
        assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    train_alone(file, *changes_for(two_then_one))
    expected, saved = (read_lines(alone / "metrics.jsonl"), read_tensors(alone / LAST))
    assert saved["critic/weight/score.weight"].any()
    assert all(line["critic/vf_loss"] > 0 and line["actor/pg_loss"] for line in expected)
    for folder in (together, one_then_two, two_then_one):
        lines = read_lines(folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2]
        for of_one, of_two in zip(expected, lines, strict=True):
            names = [key for key in of_one if not key.startswith(CLOCKS) and "seconds" not in key]
            assert {name: of_two[name] for name in names} == pytest.approx(
                {name: of_one[name] for name in names}, rel=1e-5, abs=1e-6
            ), folder
        found = read_tensors(folder / LAST)
        assert found.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-5), name


@pytest.mark.slow
def test_what_two_ranks_saved_goes_on_with_one(runs: Runs, capsys: pytest.CaptureFixture[str]):
    changes = [*changes_for(runs.together), "trainer.total_training_steps=3"]
    train_alone(runs.file, *changes)
    output = capsys.readouterr().out
    assert "resumed from" in output
    assert [line["step"] for line in read_lines(runs.together / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_layout_is_invisible_two_ranks_choose_the_groups_and_baselines_of_one(
    tiny_home: Path, tmp_path: Path
):
    (tmp_path / "parity.py").write_text(
        "def compute_score(solution_str, **_):\n    return float(len(solution_str) % 2)\n"
    )
    file = run_file(
        tiny_home, tmp_path, algorithm__filter_groups__enable=True,
        algorithm__adv_estimator="remax", trainer__save_freq=-1,
        reward__custom_reward_function={"path": f"{tmp_path}/parity.py"},
    )  # fmt: skip
    alone, together = tmp_path / "alone", tmp_path / "together"
    with ranks_of("agentrl", "train", str(file), *changes_for(together)) as ranks:
        train_alone(file, *changes_for(alone))
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    for step in (1, 2):
        one, two = (
            [
                (line["request"]["request_id"], line["request"]["dropped"])
                for line in read_lines(folder / f"rollouts/step_00000{step}.jsonl.zst")
            ]
            for folder in (alone, together)
        )
        assert one == two
        assert sum(dropped is None for _, dropped in one) == 15
        assert len(one) > 20, "groups were dropped, and others taken in their place"
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (alone, together))
    for of_one, of_two in zip(one, two, strict=True):
        names = [name for name in of_one if not name.startswith(CLOCKS) and "seconds" not in name]
        assert {name: of_two[name] for name in names} == pytest.approx(
            {name: of_one[name] for name in names}, rel=1e-4, abs=1e-5
        )
        assert of_one["filter_groups/num_without_signal"] > 0
        assert "rollout/greedy_reward/mean" in of_one


# Under fire.


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other_and_the_run_goes_on(tiny_home: Path, tmp_path: Path):
    file = run_file(tiny_home, tmp_path, deed="os.kill(os.getpid(), 9)")
    assert [rank.code for rank in train_on_two_ranks(file, ONE_STEP)] == [0, 0]
    (tmp_path / "armed").touch()
    began = time.monotonic()
    main, killed = train_on_two_ranks(file)
    assert time.monotonic() - began < 60, "not the limit of a collective"
    assert (main.code, killed.code) == (2, -9)
    assert (
        "rank 0: error: rank 0 lost the other ranks in the wait after reward of step 2" in main.err
    )
    assert "rank 1 started gen of step 2" in main.err  # it scores while others roll out
    (tmp_path / "armed").unlink()
    main, _ = train_on_two_ranks(file)
    assert main.code == 0
    assert "resumed from" in main.out
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2]


@pytest.mark.slow
def test_failures_are_judged_over_all_ranks(tiny_home: Path, tmp_path: Path):
    file = run_file(tiny_home, tmp_path, deed="raise ValueError('broke')")
    (tmp_path / "armed").touch()
    for output in train_on_two_ranks(file, "rollout.failure.max_failed_frac=0.4"):
        assert output.code == 2
        assert "7 of 15 requests failed" in output.err
        assert "7 x reward: ValueError: the reward function" in output.err
    saved = [
        f"trainer.rollout_data_dir={tmp_path}/run/rollouts",
        "rollout.failure.policy=drop_group",
    ]
    assert [output.code for output in train_on_two_ranks(file, ONE_STEP, *saved)] == [0, 0]
    requests = [r["request"] for r in read_lines(tmp_path / "run/rollouts/step_000001.jsonl.zst")]
    failed = {r["uid"] for r in requests if r["state"] == "failed"}
    assert len(failed) == 3, "two groups of the second rank, and one that it shares"
    assert {r["uid"] for r in requests if r["dropped"]} == failed


@pytest.mark.slow
def test_error_that_all_ranks_know_of_saves_the_last_step(tiny_home: Path, tmp_path: Path):
    # The second rank scores seven of a step's fifteen rollouts: the second step's fail.
    calls = "calls = HERE / 'calls'; calls.open('a').write('x'); assert calls.stat().st_size <= 7"
    file = run_file(tiny_home, tmp_path, deed=calls, trainer__save_freq=-1)
    (tmp_path / "armed").touch()
    main, other = train_on_two_ranks(file, "rollout.failure.max_failed_frac=0.4")
    assert (main.code, other.code) == (2, 2)
    assert "7 of 15 requests failed" in main.err
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["global_step_1"]


@pytest.mark.slow
def test_ranks_with_unlike_work_wait_for_each_other(tiny_home: Path, tmp_path: Path):
    file = run_file(tiny_home, tmp_path, deed="time.sleep(20)")
    (tmp_path / "armed").touch()
    assert [rank.code for rank in train_on_two_ranks(file, ONE_STEP)] == [0, 0]
    short = ["trainer.collective_timeout_s=8", "trainer.resume_mode=disable"]
    main, other = train_on_two_ranks(file, *short)
    assert (main.code, other.code) == (2, 2)
    assert "waited longer than 8 s for the other ranks in the wait after reward" in main.err
    assert "key: trainer.collective_timeout_s" in main.err


@pytest.mark.slow
def test_one_prompt_and_more_ranks_than_samples(tiny_home: Path, tmp_path: Path):
    file = run_file(tiny_home, tmp_path, data__train_batch_size=1, rollout__n=2)
    with ranks_of("agentrl", "train", str(file), size=3) as ranks:
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0, 0], outputs
    assert "its 2 samples leave 1 of 3 ranks without work" in outputs[0].out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_torchrun_leaves_no_process(
    tiny_home: Path, tmp_path: Path, number: signal.Signals
):
    file = run_file(tiny_home, tmp_path, deed="time.sleep(50)")
    (tmp_path / "armed").touch()
    process = spawn_torchrun("train", str(file))
    try:
        await_file(tmp_path / "reached", process)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "interrupted" in out, err
    assert len(ranks) >= 2
    assert not [rank for rank in ranks if rank.is_running()]


def spawn_torchrun(*arguments: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "--master-port", str(free_port()), "-m", "agentrl", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def await_file(file: Path, process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{file} never came"
        time.sleep(0.05)


def finish(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    """Wait for a command that succeeds; returns what it printed."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_quick_start_learns_on_two_ranks_as_on_one(tmp_path: Path):
    file = "examples/gsm8k_multiturn/quickstart.yaml"
    changes = [f"trainer.default_local_dir={tmp_path}", "trainer.plot=false"]
    # One rank takes a quarter of the time that two take on two cores.
    finish(spawn_agentrl("sft", file, *changes), timeout_s=600)
    out = finish(spawn_torchrun("train", file, *changes), timeout_s=850)
    assert f"warmed-up policy: {tmp_path}/warmed_up, made before" in out
    success = [
        line["val/arithmetic/success"]
        for line in read_lines(tmp_path / "metrics.jsonl")
        if "val/arithmetic/success" in line
    ]
    assert success[0] < 0.5, out
    assert success[-1] > 0.9, out
