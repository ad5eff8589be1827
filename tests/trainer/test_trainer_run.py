"""Whole runs of a tiny policy: what they write, what they measure, how they end."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.engines import ScriptedEngine
from agentrl.errors import CheckpointError, DataError, RolloutError
from agentrl.trainer.components import start_components
from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.trainer.setup.rollout_setup import make_manager
from agentrl.workers.rank_status import RankStatus
from tests.fakes.checkpoints import read_tensors
from tests.fakes.runs import CALL, read_lines, scripted, tiny_run

pytestmark = pytest.mark.usefixtures("alone")

METRICS = (
    "actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy", "actor/grad_norm",
    "actor/lr", "critic/score/mean", "critic/rewards/mean", "critic/rewards/max",
    "critic/advantages/mean", "critic/returns/mean", "response_length/mean",
    "response_length/clip_ratio", "prompt_length/mean", "num_turns/mean", "timing_s/gen",
    "timing_s/reward", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/step",
    "rollout/mask_ones_ratio", "rollout/tool_calls/mean", "rollout/tool_calls/malformed",
    "rollout/stop_reason/answered", "rollout/failures/tool", "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_std", "perf/throughput",
    "training/global_step", "training/epoch", "training/policy_version",
)  # fmt: skip
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 7) / 7
"""

Fit = Callable[..., Trainer]


@pytest.fixture
def scorer(tmp_path: Path) -> dict[str, Any]:
    """A reward that differs within groups, so that there is something to train on."""
    file = tmp_path / "score.py"
    file.write_text(SCORER)
    return {"path": str(file)}


@pytest.fixture
def fit(tiny_home: Path, tmp_path: Path, scorer: dict[str, Any]) -> Fit:
    """Run a tiny configuration to its end."""

    def run(folder: str = "run", **changes: Any) -> Trainer:
        changes = {"reward__custom_reward_function": scorer} | changes
        trainer = Trainer(parse_config(tiny_run(tiny_home, tmp_path / folder, **changes)))
        trainer.fit()
        return trainer

    return run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    clocks = (
        "timing_s/", "perf/", "rollout/turn_seconds", "rollout/tool/", "reward/seconds",
        "weight_sync/seconds",
    )  # fmt: skip
    return {name: value for name, value in line.items() if not name.startswith(clocks)}


# What a run leaves behind.


def test_run_leaves_figures_rollouts_checkpoint_policy_curve_and_summary(
    fit: Fit, tmp_path: Path, tiny_home: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    fit(
        trainer__logger=["console", "jsonl", "tensorboard"],
        trainer__rollout_data_dir=str(folder / "rollouts"),
        trainer__validation_data_dir=str(folder / "validation"),
        trainer__plot=True,
        actor__entropy_coeff=1e-3,  # rewards are equal; without it no row would be computed
        trainer__seed=3,
        data__max_prompt_length=256,
        data__max_response_length=128,
        rollout__multi_turn__max_tokens_per_turn=64,
        rollout__engine=scripted(CALL, "#### 42"),
    )
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"val/arithmetic/success", "val/arithmetic/num"} <= lines[0].keys()
    assert not set(METRICS) - lines[1].keys()
    assert "val/arithmetic/success" in lines[2]
    assert lines[1]["rollout/tool_calls/ok"] == 1.0
    assert lines[1]["rollout/tool/calculator/num_calls"] == 8.0
    assert 0 < lines[1]["rollout/mask_ones_ratio"] < 1

    saved = list(read_trajectories(folder / "rollouts/step_000001.jsonl.zst"))
    assert len(saved) == 8
    assert {one.request.uid.count("-") for one in saved} == {3}
    assert all(one.summary.num_turns == 4 for one in saved)
    call = saved[0].request.turns[0].calls[0]
    assert (call.name, call.outcome, call.arguments) == ("calculator", "ok", {"expression": "6*7"})
    tokens = pandas.read_parquet(folder / "rollouts/step_000001.tokens.parquet")
    assert sorted(tokens.request_id) == sorted(one.request.request_id for one in saved)
    assert (folder / "validation/val_arithmetic_000000.jsonl.zst").is_file()
    assert (folder / "validation/val_arithmetic_000002.jsonl.zst").is_file()

    summary = json.loads((folder / "summary.json").read_text())
    wanted = {"val_success_before", "val_success_after", "num_val", "seconds_total", "seed"}
    assert not wanted - summary.keys()
    assert (summary["num_val"], summary["seed"], summary["steps"]) == (6, 3, 2)
    assert summary["checkpoint"] == str(folder / "checkpoints/global_step_2")
    assert summary["exported"] == str(folder / "trained")
    assert summary["seconds_total"] > 0

    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    model = AutoModelForCausalLM.from_pretrained(folder / "trained")
    assert model.config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(folder / "trained").chat_template
    console = capsys.readouterr().out
    assert "Qwen2ForCausalLM" in console
    assert "engine: scripted" in console


def test_training_changes_the_policy_and_the_engine_samples_with_it(fit: Fit, tiny_home: Path):
    trainer = fit()
    before, after = weights_of(tiny_home / "policy"), weights_of(trainer.folder / "trained")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    lines = read_lines(trainer.folder / "metrics.jsonl")
    versions = [line["rollout/policy_version/max"] for line in lines[1:]]
    assert versions == [0.0, 1.0], "each step samples with the weights of the one before"
    assert all(line["actor/grad_norm"] > 0 for line in lines[1:])


def test_home_folder_is_meant_by_a_tilde_and_a_trainer_closes_twice(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = fit(
        trainer__default_local_dir="~/mine",
        trainer__rollout_data_dir="~/mine/rollouts",
        trainer__total_training_steps=1,
        trainer__collective_timeout_s=77,
        data__val_files=None,
    )
    assert trainer.folder == tmp_path / "mine"
    assert (tmp_path / "mine/summary.json").is_file()
    assert (tmp_path / "mine/rollouts/step_000001.jsonl.zst").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert trainer.world.status.timeout_s == 77
    trainer.close()


def test_validation_before_training_can_be_left_out(fit: Fit):
    trainer = fit(trainer__val_before_train=False, trainer__total_training_steps=1)
    lines = read_lines(trainer.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1]
    assert trainer.summary.val_success_before is None
    assert trainer.summary.val_success_after is not None


def test_validation_alone_trains_and_saves_nothing(fit: Fit):
    trainer = fit(trainer__val_only=True, trainer__total_training_steps=None)
    assert [line["step"] for line in read_lines(trainer.folder / "metrics.jsonl")] == [0]
    names = {path.name for path in trainer.folder.iterdir()}
    assert names == {"metrics.jsonl", "run.lock", "started", "starts", "summary.json"}
    assert trainer.summary.val_success_before == trainer.summary.val_success_after


def test_run_without_validation_set_trains(fit: Fit):
    trainer = fit(data__val_files=None, trainer__total_training_steps=1)
    assert trainer.summary.num_val == 0
    assert trainer.summary.val_success_after is None


def test_batch_larger_than_the_data_is_reported_before_the_model_loads(
    tiny_home: Path, tmp_path: Path
):
    run = tiny_run(
        tiny_home,
        tmp_path / "run",
        data__train_batch_size=400,
        actor__ppo_mini_batch_size=None,
        trainer__total_training_steps=None,
        model__dtype="bfloat16",
    )
    with pytest.raises(DataError, match="a batch of 400 prompts from"):
        start_components(parse_config(run))


# The engine's traps.


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_agree_after_weights_have_moved(fit: Fit, temperature: float):
    trainer = fit(
        rollout__temperature=temperature,
        actor__optim={"lr": 0.02},
        trainer__total_training_steps=4,
        trainer__test_freq=1,
    )
    lines = read_lines(trainer.folder / "metrics.jsonl")[1:]
    moved = [line["actor/grad_norm"] for line in lines]
    assert all(norm > 0 for norm in moved)
    assert lines[-1]["rollout/cached_tokens_frac"] > 0.1, "the prefix cache is in use"
    for line in lines:
        assert line["training/rollout_log_probs_diff_max"] < 1e-4
        assert line["training/rollout_probs_diff_max"] < 1e-5


def test_reference_is_the_policy_as_it_began(fit: Fit):
    trainer = fit(
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        actor__ppo_mini_batch_size=None,
        actor__optim={"lr": 0.01},
        trainer__total_training_steps=3,
    )
    lines = read_lines(trainer.folder / "metrics.jsonl")[1:]
    assert all("timing_s/ref" in line for line in lines)
    assert lines[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert lines[2]["actor/kl_loss"] > 1e-5


# Going on.


def deterministic(config: Any) -> Trainer:
    """A trainer whose policy says what request, turn and weights' version make it say."""
    parts = start_components(config)
    words = ("#### 42", "well 17", "no 3 or 4", CALL, "#### 5 6 7", "it is 8")

    def answer(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
        return words[(sum(map(ord, request_id)) + 3 * turn) % len(words)]

    engine = ScriptedEngine(answer, tokenizer=parts.setup.tokenizer, max_model_len=1024)
    manager = make_manager(config, parts.setup, engine)
    return Trainer(config, dataclasses.replace(parts, engine=engine, manager=manager))


def test_resumed_run_is_the_run_that_was_never_stopped(
    tiny_home: Path, tmp_path: Path, scorer: dict[str, Any]
):
    def config(folder: str, steps: int) -> Any:
        changes = {
            "reward__custom_reward_function": scorer,
            "trainer__total_training_steps": steps,
            "trainer__rollout_data_dir": str(tmp_path / folder / "rollouts"),
            "data__train_batch_size": 6,
            "actor__shuffle": True,
            "actor__ppo_epochs": 2,
            "trainer__save_freq": 2,
        }
        return parse_config(tiny_run(tiny_home, tmp_path / folder, **changes))

    deterministic(config("whole", 4)).fit()
    deterministic(config("parts", 2)).fit()
    deterministic(config("parts", 4)).fit()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lines = [read_lines(folder / "metrics.jsonl") for folder in (whole, parts)]
    assert [line["step"] for line in lines[1]] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(lines[0][-2:], lines[1][-2:], strict=True):
        assert without_clock(ours) == without_clock(theirs)
    for step in (3, 4):
        files = [folder / f"rollouts/step_00000{step}.jsonl.zst" for folder in (whole, parts)]
        uids = [[one.request.uid for one in read_trajectories(file)] for file in files]
        assert uids[0] == uids[1]
    ours, theirs = weights_of(whole / "trained"), weights_of(parts / "trained")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    checkpoints = [folder / "checkpoints/global_step_4" for folder in (whole, parts)]
    states = [json.loads((path / "state.json").read_text()) for path in checkpoints]
    for part in ("data", "actor", "random", "step", "identity"):
        assert states[0][part] == states[1][part]
    moments = [read_tensors(path) for path in checkpoints]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


def test_finished_run_started_again_is_left_as_it_is(fit: Fit, capsys: pytest.CaptureFixture[str]):
    first = fit(trainer__val_before_train=False)
    before = (first.folder / "metrics.jsonl").read_text()
    exported = weights_of(first.folder / "trained")
    capsys.readouterr()
    again = fit(trainer__val_before_train=False, trainer__total_training_steps=1)
    assert "all 2 steps are done" in capsys.readouterr().out
    assert (first.folder / "metrics.jsonl").read_text() == before
    after = weights_of(first.folder / "trained")
    assert all(torch.equal(exported[name], after[name]) for name in exported)
    assert again.summary.steps == 2
    assert again.summary.val_success_after == first.summary.val_success_after
    assert again.summary.checkpoint == first.summary.checkpoint


def test_writing_a_checkpoint_and_the_policy_are_stages(fit: Fit, monkeypatch: pytest.MonkeyPatch):
    stages, enter = list[str](), RankStatus.enter

    def record(status: RankStatus, stage: str) -> None:
        stages.append(stage)
        enter(status, stage)

    monkeypatch.setattr(RankStatus, "enter", record)
    fit(trainer__total_training_steps=1)
    assert stages[-3:] == ["checkpoint of step 1", "export of step 1", "checkpoint"]


def test_resume_can_be_disabled(fit: Fit):
    first = fit(trainer__total_training_steps=1)
    second = fit(trainer__total_training_steps=1, trainer__resume_mode="disable")
    assert first.folder == second.folder
    assert [line["step"] for line in read_lines(second.folder / "metrics.jsonl")] == [0, 1]
    assert (second.folder / "metrics.1.jsonl").is_file(), "the first run's figures are kept"


def test_run_does_not_go_on_from_another_policys_checkpoint(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
):
    fit(trainer__total_training_steps=1)
    monkeypatch.setattr("agentrl.trainer.state.resume.policy_origin", lambda _: "made anew")
    with pytest.raises(CheckpointError, match="began from another policy"):
        fit(trainer__total_training_steps=2)


def test_resume_from_a_path_goes_on_from_there(fit: Fit, capsys: pytest.CaptureFixture[str]):
    first = fit("first", trainer__save_freq=1)
    path = first.folder / "checkpoints/global_step_1"
    fit("second", trainer__resume_mode="resume_path", trainer__resume_from_path=str(path))
    output = capsys.readouterr().out
    assert f"resumed from {path} at step 1" in output
    lines = read_lines(first.folder.with_name("second") / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2]


def test_checkpoints_beyond_the_number_to_keep_are_dropped(fit: Fit):
    trainer = fit(
        trainer__total_training_steps=4,
        trainer__save_freq=1,
        trainer__max_ckpt_to_keep=2,
        data__val_files=None,
    )
    names = sorted(path.name for path in (trainer.folder / "checkpoints").iterdir())
    assert names == ["global_step_3", "global_step_4"]


# Failures.

FLAKY = """
from agentrl.tools import BaseTool, OpenAIFunctionToolSchema


class Flaky(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "flaky"}})

    async def create(self, instance_id=None, **create_kwargs):
        if "train-" in instance_id and instance_id.endswith("-0"):
            raise OSError("the database is down")
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        return "up"
"""


@pytest.fixture
def flaky(tmp_path: Path) -> dict[str, Any]:
    """A tool that breaks the first sample of each group, at its first attempt."""
    (tmp_path / "flaky.py").write_text(FLAKY)
    file = tmp_path / "flaky.yaml"
    file.write_text(f"tools:\n  - class_name: {tmp_path}/flaky.py:Flaky\n")
    return {
        "rollout__multi_turn__tool_config_path": str(file),
        "rollout__n": 3,
        "trainer__total_training_steps": 1,
        "data__max_prompt_length": 256,
    }


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("mask", {"failed": 1 / 3, "dropped": 0, "retried": 0}),
        ("drop_group", {"failed": 1 / 3, "dropped": 1, "retried": 0}),
        ("retry", {"failed": 0, "dropped": 0, "retried": 1 / 3}),
    ],
)
def test_failed_requests_meet_the_declared_policy(
    fit: Fit, flaky: dict[str, Any], policy: str, shares: dict[str, float]
):
    trainer = fit(**flaky, rollout__failure={"policy": policy})
    line = read_lines(trainer.folder / "metrics.jsonl")[1]
    assert {name: line[f"rollout/{name}_frac"] for name in shares} == pytest.approx(shares)
    assert line["rollout/failures/tool"] == pytest.approx(shares["failed"])
    assert (line.get("actor/grad_norm", 0) > 0) == (policy != "drop_group")


def test_failed_request_ends_the_run_where_the_policy_is_raise(fit: Fit, flaky: dict[str, Any]):
    with pytest.raises(RolloutError, match="4 of 12 requests failed") as raised:
        fit(**flaky, rollout__failure={"policy": "raise"})
    assert "the database is down" in str(raised.value)


def test_scorer_that_fails_everywhere_ends_the_run(fit: Fit, tmp_path: Path):
    (tmp_path / "nan.py").write_text("def compute_score(*a, **k):\n    return float('nan')\n")
    with pytest.raises(RolloutError, match="requests failed") as raised:
        fit(reward__custom_reward_function={"path": str(tmp_path / "nan.py")})
    assert "nan" in str(raised.value)
