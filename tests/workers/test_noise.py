"""The update of a model computes what its scoring computes: no dropout, unless the run asks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import CriticModelConfig, FsdpConfig
from agentrl.protocol import DataProto
from agentrl.workers.attention import find_noise
from agentrl.workers.distributed import World
from agentrl.workers.load import load_policy
from agentrl.workers.value_model import load_value_model
from tests.fakes.families import FAMILIES
from tests.fakes.training import gradients, make_actor, make_batch, random_rows

NOISE: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "gptj": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "phi": {"attention_dropout": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "phi3": {"attention_dropout": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    "phimoe": {"attention_dropout": 0.5, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
    "mixtral": {"attention_dropout": 0.5, "router_jitter_noise": 0.5},
    "qwen2": {"attention_dropout": 0.5},
    "gemma3n_text": {"attention_dropout": 0.5, "altup_coef_clip": 0.001},
    "starcoder2": {"residual_dropout": 0.5, "embedding_dropout": 0.5},
}
ROWS = random_rows(4, seed=3)


def save(name: str, folder: Path, noise: dict[str, Any]) -> str:
    family = FAMILIES[name]
    replace(family, given={**family.given, **noise}).model().save_pretrained(folder)
    return str(folder)


def with_own_log_probs(actor: Any) -> DataProto:
    batch = make_batch(ROWS)
    scores = actor.compute_log_probs(batch, temperature=1.0)
    batch.batch["old_log_probs"] = scores.log_probs
    return batch


def update(world: World, model: ModelConfig) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Take a step on log-probabilities of the same weights; return metrics and gradients."""
    policy = load_policy(model, world, FsdpConfig())
    actor = make_actor(policy)
    trap: list[dict[str, torch.Tensor]] = []
    actor.optimizer.step = lambda **_: trap.append(gradients(policy))  # type: ignore[method-assign]
    metrics = actor.update_policy(with_own_log_probs(actor), temperature=1.0).metrics
    return metrics, trap[0]


@pytest.mark.parametrize("name", NOISE)
def test_ratio_of_a_first_mini_batch_is_one(world: World, tmp_path: Path, name: str):
    path = save(name, tmp_path, NOISE[name])
    metrics, plain = update(world, ModelConfig(path=path))
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0.0
    again, computed_again = update(
        world, ModelConfig(path=path, enable_gradient_checkpointing=True)
    )
    assert again == metrics
    for weight, gradient in computed_again.items():
        assert torch.equal(gradient, plain[weight]), weight


def test_layers_are_computed_again_in_the_backward_pass(world: World, tmp_path: Path):
    path = save("qwen2", tmp_path, {})
    counts: list[int] = []
    for is_on in (False, True):
        model = ModelConfig(path=path, enable_gradient_checkpointing=is_on)
        policy = load_policy(model, world, FsdpConfig())
        actor, calls = make_actor(policy), [0]
        attention = policy.lm.get_submodule("model.layers.1.self_attn")
        attention.register_forward_hook(lambda *_, c=calls: c.__setitem__(0, c[0] + 1))
        actor.update_policy(make_batch(ROWS), temperature=1.0)
        counts.append(calls[0])
    assert counts[1] == 2 * counts[0]


def test_run_that_asks_for_dropout_gets_it(world: World, tmp_path: Path):
    path = save("qwen2", tmp_path, {})
    model = ModelConfig(path=path, override_config={"attention_dropout": 0.5})
    policy = load_policy(model, world, FsdpConfig())
    assert policy.noise == ["attention_dropout"]
    assert policy.max_sharing_length(share_prefixes=True) == 0
    metrics, _ = update(world, model)
    assert abs(metrics["actor/ppo_kl"]) > 1e-3
    critic = load_value_model(CriticModelConfig(), model, world, FsdpConfig())
    assert critic.noise == ["attention_dropout"]


def test_critic_has_no_dropout(world: World, tmp_path: Path):
    model = ModelConfig(path=save("gpt2", tmp_path, NOISE["gpt2"]))
    critic = load_value_model(CriticModelConfig(), model, world, FsdpConfig())
    assert not any(module.training for module in critic.train().modules())


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"attn_pdrop": 0.1}, ["attn_pdrop"]),
        ({"layerdrop": 0.1, "attention_dropout": 0.0}, ["layerdrop"]),
        ({"text_config": {"router_jitter_noise": 0.01}}, ["router_jitter_noise"]),
        ({"normalize_router_prob_before_dropping": True, "rope_theta": 1e6}, []),
    ],
)
def test_keys_that_ask_for_noise(overrides: dict[str, Any], found: list[str]):
    assert find_noise(overrides) == found
