"""Runs with a critic, from a configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import Trainer
from agentrl.algorithms import compute_value_loss
from agentrl.config import parse_config
from agentrl.config.schema.training import OptimConfig
from agentrl.doctor.memory import critic_size
from agentrl.errors import CheckpointError, ConfigError, TrainingError
from agentrl.trainer import components
from agentrl.trainer.setup.preflight import checkpoint_bytes
from agentrl.workers.distributed import stop_world
from tests.fakes.runs import tiny_run


def score_parity(data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """Return 1 for answers of an odd length: a reward that an untrained policy gets, too."""
    return float(len(solution_str) % 2)


def train(home: Path, folder: Path, steps: int, **changes: Any) -> list[dict[str, float]]:
    """Run `steps` steps with `score_parity`; return the metrics of each step."""
    content = tiny_run(
        home, folder, trainer__total_training_steps=steps, trainer__save_freq=1,
        rollout__deterministic=True, data__val_files=None, **changes,
    )  # fmt: skip
    config = parse_config(content)
    Trainer(config, reward=score_parity).fit()
    stop_world()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/global_step_{step}/rank_0.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("estimator", ["gae", "turn_gae"])
def test_run_with_a_critic_resumes_exactly(tiny_home: Path, tmp_path: Path, estimator: str):
    chosen = {"algorithm__adv_estimator": estimator, "algorithm__whiten_rewards": True}
    metrics = train(tiny_home, tmp_path / "whole", 3, **chosen)
    train(tiny_home, tmp_path / "cut", 1, **chosen)
    train(tiny_home, tmp_path / "cut", 3, **chosen)
    whole, cut = tensors(tmp_path / "whole", 3), tensors(tmp_path / "cut", 3)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert whole["critic/weight/score.weight"].any(), "the critic has learned"
    assert all(step["critic/vf_loss"] > 0 for step in metrics)
    for phase in ("values", "update_critic"):
        assert all(step[f"perf/tokens_per_s/{phase}"] > 0 for step in metrics)
    assert {"critic/vf_explained_var", "critic/values/mean", "critic/returns/mean"} <= {*metrics[0]}


@pytest.mark.usefixtures("alone")
def test_warm_up_trains_the_critic_alone(tiny_home: Path, tmp_path: Path):
    chosen = {"algorithm__adv_estimator": "gae", "trainer__critic_warmup": 1}
    first, second = train(tiny_home, tmp_path, 2, **chosen)
    assert first["critic/optimizer_steps"] > 0
    assert first["actor/optimizer_steps"] == 0
    assert second["actor/optimizer_steps"] > 0


@pytest.mark.usefixtures("alone")
def test_checkpoint_without_a_critic_is_refused(tiny_home: Path, tmp_path: Path):
    train(tiny_home, tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no critic, and"):
        train(tiny_home, tmp_path, 2, algorithm__adv_estimator="gae")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("limit", [2, None])
def test_run_whose_critic_takes_no_step_any_more_ends(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
):
    def not_finite(vpreds: torch.Tensor, *rest: Any, **scale: Any) -> Any:
        loss, clip_frac = compute_value_loss(vpreds, *rest, **scale)
        return loss * torch.nan, clip_frac

    monkeypatch.setattr("agentrl.workers.critic.compute_value_loss", not_finite)
    chosen = {"algorithm__adv_estimator": "gae", "critic__max_skipped_updates": limit}
    if limit is None:
        metrics = train(tiny_home, tmp_path, 3, **chosen)
        assert [step["critic/optimizer_steps"] for step in metrics] == [0, 0, 0]
        assert [step["critic/skipped_steps"] for step in metrics] == [1, 1, 1]
        return
    with pytest.raises(TrainingError, match="last 2 updates of the critic took no step") as raised:
        train(tiny_home, tmp_path, 3, **chosen)
    assert raised.value.details["key"] == "critic.max_skipped_updates"
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert saved[-1] == "global_step_2", "what was reached is kept"


@pytest.mark.usefixtures("alone")
def test_checkpoint_of_policy_and_critic_must_fit_on_the_disk(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    needed: list[int] = []

    def refuse(folder: Path, num_bytes: int) -> None:
        needed.append(num_bytes)
        raise ConfigError(f"{folder} has too little space")

    monkeypatch.setattr(components, "check_disk_space", refuse)
    run = tiny_run(tiny_home, tmp_path)
    for estimator in ("grpo", "gae"):
        config = parse_config(run | {"algorithm": {"adv_estimator": estimator}})
        with pytest.raises(ConfigError, match="too little space"):
            components.start_components(config)
        stop_world()
    size = critic_size(config)
    assert size is not None
    assert needed[1] - needed[0] == checkpoint_bytes(size.num_weights, OptimConfig())
