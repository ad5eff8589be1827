"""The critic: its values and its update, and the model that it is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.config import parse_config
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import CriticModelConfig, FsdpConfig
from agentrl.doctor.memory import critic_size
from agentrl.errors import CheckpointError, ConfigError, OutOfMemoryError
from agentrl.protocol import DataProto
from agentrl.workers.checkpoint import ModelIdentity, RunState, open_checkpoint
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import load_run, save_run
from agentrl.workers.value_model import ValueModel, drop_head, load_value_model
from tests.fakes.engines import tiny_model
from tests.fakes.training import Row, make_actor, make_batch, make_policy, random_rows
from tests.fakes.value_equality import make_critic


def critic_batch(rows: list[Row]) -> DataProto:
    batch = make_batch(rows)
    shape = batch.batch["response_mask"].shape
    draw = torch.Generator().manual_seed(0)
    batch.batch["values"] = torch.zeros(shape)
    batch.batch["returns"] = torch.randn(shape, generator=draw)
    return batch


def test_new_critic_values_everything_at_0_and_learns_the_returns(world: World):
    critic, batch = make_critic(world, head=False), critic_batch(random_rows(12))
    assert not critic.compute_values(batch).any()
    first = critic.update_critic(batch).metrics
    for _ in range(60):
        batch.batch["values"] = critic.compute_values(batch)
        last = critic.update_critic(batch).metrics
    assert last["critic/vf_loss"] < first["critic/vf_loss"] / 2
    names = ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "optimizer_steps")
    assert {f"critic/{name}" for name in names} <= last.keys()


def test_value_of_a_token_is_that_of_the_state_before_it(world: World):
    critic, rows = make_critic(world), random_rows(6)
    values = critic.compute_values(make_batch(rows))
    model = critic.model
    for index, row in enumerate(rows):
        ids = torch.tensor([row.prompt + row.response])
        with torch.no_grad():
            hidden = tiny_model(initializer_range=0.1).base_model(ids).last_hidden_state[0]
            every = model.score(hidden).squeeze(-1)[len(row.prompt) - 1 : -1]
        expected = torch.where(torch.tensor(row.mask).bool(), every, 0.0)
        assert torch.allclose(values[index, : len(row.mask)], expected, atol=1e-5)
        assert not values[index, len(row.mask) :].any()


@pytest.mark.parametrize("broken", ["returns", "weight"])
def test_step_that_is_not_finite_changes_nothing_and_names_the_requests(world: World, broken: str):
    critic, batch = make_critic(world), critic_batch([Row([1, 2], [3, 4], [1, 1])])
    if broken == "weight":
        with torch.no_grad():
            critic.model.score.bias.fill_(float("inf"))
    else:
        batch.batch["returns"][0, 1] = float("nan")
    before = {name: weight.clone() for name, weight in critic.model.named_weights()}
    result = critic.update_critic(batch)
    (skipped,) = result.skipped
    assert skipped.role == "critic"
    assert skipped.request_ids == ("r0",)
    assert result.metrics["critic/skipped_steps"] == 1
    assert all(torch.equal(before[name], w) for name, w in critic.model.named_weights())


def test_head_of_a_critic_in_16_bits_is_float32(world: World):
    model = ValueModel(drop_head(tiny_model()), world, torch.bfloat16, FsdpConfig())
    with torch.no_grad():
        model.score.weight.fill_(1.0)
    seen: list[torch.dtype] = []
    model.score.register_forward_hook(
        lambda _, inputs, out: seen.extend((inputs[0].dtype, out.dtype))
    )
    critic = make_critic(world, model=model)
    assert critic.compute_values(make_batch(random_rows(2))).dtype == torch.float32
    assert set(seen) == {torch.float32}


def test_saved_critic_has_its_head(world: World, tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    policy = ModelConfig(path=str(tmp_path))
    new = load_value_model(CriticModelConfig(), policy, world, FsdpConfig())
    assert not any(weight.any() for weight in new.score.parameters())
    head = {"score.weight": torch.randn(1, 32), "score.bias": torch.randn(1)}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    own = CriticModelConfig(path=str(tmp_path))
    saved = load_value_model(own, policy, world, FsdpConfig())
    assert torch.equal(saved.score.weight, head["score.weight"])
    assert torch.equal(saved.score.bias, head["score.bias"])
    save_file(
        load_file(file) | {"score.weight": torch.randn(3, 32)}, file, metadata={"format": "pt"}
    )
    with pytest.raises(ConfigError, match=r"score.weight has the shape \[3, 32\]"):
        load_value_model(own, policy, world, FsdpConfig())


def test_memory_that_runs_out_names_the_values_and_the_critics_keys(world: World):
    critic = make_critic(world)
    critic.model.score.register_forward_pre_hook(lambda *_: torch.empty(1 << 50))
    batch = critic_batch([Row([1, 2], [3, 4], [1, 1])])
    for doing, compute in (
        ("values", critic.compute_values),
        ("the update of the critic", critic.update_critic),
    ):
        with pytest.raises(OutOfMemoryError, match=f"memory ran out in {doing}: ") as raised:
            compute(batch)
        text = str(raised.value)
        assert "critic.ppo_max_token_len_per_gpu" in text
        assert "critic.model.enable_gradient_checkpointing=true" in text
        assert "actor." not in text
        assert "3 tokens of 1 sequences, 2 of them trained" in text


def test_size_that_the_doctor_counts_is_that_of_the_tensors(world: World, tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    run = {"data": {"train_files": ["none.parquet"]}, "model": {"path": str(tmp_path)}}
    config = parse_config(run | {"algorithm": {"adv_estimator": "gae"}})
    model = load_value_model(config.critic.model, config.model, world, FsdpConfig())
    size = critic_size(config)
    assert size is not None
    held = sum(weight.numel() for _, weight in model.named_weights())
    assert size.num_weights == size.trained_weights == held
    assert critic_size(parse_config(run)) is None


def save(world: World, root: Path, **config: Any) -> tuple[Any, Any, Path]:
    actor, critic = make_actor(make_policy(world)), make_critic(world)
    batch = critic_batch(random_rows(8))
    actor.update_policy(batch, temperature=1.0)
    critic.update_critic(batch)
    state = RunState(step=1, identity=ModelIdentity("", {}))
    return actor, critic, save_run(root, actor, state, critic=critic)


def test_resume_restores_the_critic_exactly(world: World, tmp_path: Path):
    _, critic, path = save(world, tmp_path)
    other_actor, other = make_actor(make_policy(world, seed=1)), make_critic(world, seed=1)
    load_run(open_checkpoint(path), other_actor, other)
    assert other.updater.counters() == critic.updater.counters()
    batch = critic_batch(random_rows(8, seed=3))
    for one in (critic, other):
        one.update_critic(batch)
    theirs = dict(other.model.named_weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in critic.model.named_weights())


def test_checkpoint_without_a_critic_is_refused_by_a_run_with_one(world: World, tmp_path: Path):
    actor = make_actor(make_policy(world))
    path = save_run(tmp_path, actor, RunState(step=1, identity=ModelIdentity("", {})))
    with pytest.raises(CheckpointError, match="has no critic"):
        load_run(open_checkpoint(path), actor, make_critic(world))
    load_run(open_checkpoint(path), actor)


def test_run_without_a_critic_resumes_from_a_checkpoint_with_one(world: World, tmp_path: Path):
    actor, _, path = save(world, tmp_path)
    other = make_actor(make_policy(world, seed=1))
    load_run(open_checkpoint(path), other)
    theirs = dict(other.policy.named_weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in actor.policy.named_weights())


def test_metrics_are_of_the_values_before_the_step(world: World):
    critic, batch = make_critic(world), critic_batch(random_rows(6))
    values = critic.compute_values(batch)
    batch.batch["values"] = values
    mask = batch.batch["response_mask"].bool()
    metrics = critic.update_critic(batch).metrics
    assert math.isclose(metrics["critic/vpred_mean"], values[mask].mean().item(), rel_tol=1e-4)
    squares = (values - batch.batch["returns"])[mask].square()
    assert math.isclose(metrics["critic/vf_loss"], 0.5 * squares.mean().item(), rel_tol=1e-4)
