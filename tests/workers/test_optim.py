import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.schema.training import FsdpConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.workers.distributed import World
from agentrl.workers.model import PolicyModel
from agentrl.workers.optim import PolicyOptimizer, is_matrix, make_schedule
from agentrl.workers.shards import full_tensor
from tests.fakes.engines import tiny_model
from tests.fakes.families import FAMILIES
from tests.fakes.training import make_policy, weights


def fill_gradients(named, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, weight in named:
        grad = torch.randn(weight.shape, generator=generator)
        weight.grad = grad if not hasattr(weight, "to_local") else as_shard(weight, grad)


def as_shard(weight, grad):
    return torch.distributed.tensor.distribute_tensor(grad, weight.device_mesh, weight.placements)


def test_schedule_warms_up_and_falls():
    config = OptimConfig(lr_warmup_steps=4, lr_scheduler="linear", min_lr_ratio=0.1)
    factor = make_schedule(config, total_steps=14)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert math.isclose(factor(9), 0.55)
    assert math.isclose(factor(14), 0.1)
    assert math.isclose(factor(100), 0.1)


def test_a_share_of_the_steps_may_be_the_warm_up():
    factor = make_schedule(OptimConfig(lr_warmup_steps_ratio=0.29), total_steps=14)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    both = make_schedule(OptimConfig(lr_warmup_steps_ratio=0.29, lr_warmup_steps=2), 14)
    assert [both(step) for step in range(3)] == [0.5, 1.0, 1.0]


def test_schedules_by_name():
    assert make_schedule(OptimConfig(), 10)(7) == 1.0
    cosine = make_schedule(OptimConfig(lr_scheduler="cosine"), 10)
    assert [round(cosine(step), 3) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 60))
def test_schedule_stays_between_its_ends(step, warmup, total):
    for name in ("constant", "linear", "cosine"):
        config = OptimConfig(lr_warmup_steps=warmup, lr_scheduler=name, min_lr_ratio=0.2)
        assert 0 < make_schedule(config, total)(step) <= 1


def test_adamw_on_shards_is_torchs_own(world: World):
    policy, plain = make_policy(world), tiny_model(initializer_range=0.1)
    config = OptimConfig(lr=1e-2, weight_decay=0.1)
    mine = PolicyOptimizer(policy.named_weights(), config, world, total_steps=5)
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    theirs = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )
    for seed in range(3):
        fill_gradients(policy.named_weights(), seed)
        fill_gradients(plain.named_parameters(), seed)
        mine.step()
        theirs.step()
    for name, weight in plain.named_parameters():
        assert torch.allclose(weights(policy)[name], weight, atol=1e-6), name


def test_muon_takes_the_layers_matrices_and_adamw_the_rest(world: World):
    policy = make_policy(world, tie_word_embeddings=False)
    optimizer = PolicyOptimizer(policy.named_weights(), OptimConfig(name="muon"), world, 5)
    fill_gradients(policy.named_weights(), 0)
    optimizer.step()
    state = optimizer.state_slices()
    muon = {name.partition("/")[2] for name in state if name.startswith("momentum_buffer/")}
    adamw = {name.partition("/")[2] for name in state if name.startswith("exp_avg/")}
    assert all(".layers." in name and name.endswith("proj.weight") for name in muon)
    assert "lm_head.weight" in adamw
    assert "model.embed_tokens.weight" in adamw
    assert muon | adamw == {name for name, _ in policy.named_weights()}
    assert not muon & adamw


def test_muon_takes_the_matrices_of_layers_of_any_name(world: World):
    names = ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"]
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in names]
    optimizer = PolicyOptimizer(named, OptimConfig(name="muon"), world, 5)
    muon, _ = optimizer._parts
    assert [weight.name for weight in muon.weights] == names[1:]
    with pytest.raises(ConfigError, match="muon"):
        PolicyOptimizer(named[:1], OptimConfig(name="muon"), world, 5)


@pytest.mark.parametrize(
    ("name", "shape", "is_trained_by_muon"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 6, 8), True),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (4, 6, 8), True),
        ("model.layers.0.mlp.up_proj.weight", (6, 8), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 6), False),
        ("model.layers.0.conv.conv.weight", (8, 1, 3), False),
        ("model.layers.0.input_layernorm.weight", (8,), False),
        ("model.embed_tokens.weight", (6, 8), False),
    ],
)
def test_matrices_are_those_of_layers_and_of_their_experts(
    name: str, shape: tuple[int, ...], is_trained_by_muon: bool
):
    assert is_matrix(name, torch.zeros(shape)) == is_trained_by_muon


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "gemma4_moe", "phimoe"])
def test_muon_takes_the_experts_of_each_family(world: World, family: str):
    policy = PolicyModel(FAMILIES[family].model(), world, torch.float32, FsdpConfig())
    optimizer = PolicyOptimizer(policy.named_weights(), OptimConfig(name="muon"), world, 5)
    fill_gradients(policy.named_weights(), 0)
    optimizer.step()
    muon, _ = optimizer._parts
    stacks = {name for name, weight in policy.named_weights() if weight.ndim == 3}
    assert stacks
    assert stacks <= {weight.name for weight in muon.weights}


def test_gradient_norm_is_over_all_weights_once(world: World):
    policy = make_policy(world)
    optimizer = PolicyOptimizer(policy.named_weights(), OptimConfig(), world, 5)
    assert optimizer.grad_norm() == 0.0
    fill_gradients(policy.named_weights(), 0)
    squares = [full_tensor(w.grad).square().sum() for _, w in policy.named_weights()]
    assert math.isclose(optimizer.grad_norm(), math.sqrt(sum(squares)), rel_tol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_resume_is_exact_optimizer_goes_on_from_its_state_bit_for_bit(world: World, name: str):
    config = OptimConfig(name=name, lr=1e-2, lr_scheduler="cosine")

    def run(policy, optimizer, seeds) -> None:
        for seed in seeds:
            fill_gradients(policy.named_weights(), seed)
            optimizer.step()

    policy = make_policy(world)
    optimizer = PolicyOptimizer(policy.named_weights(), config, world, 6)
    run(policy, optimizer, (0, 1, 2))
    saved = {key: value.local.clone() for key, value in optimizer.state_slices().items()}
    saved_weights = weights(policy)
    run(policy, optimizer, (3, 4))

    again = make_policy(world, seed=5)
    for key, weight in again.named_weights():
        full_tensor(weight).data.copy_(saved_weights[key])
    resumed = PolicyOptimizer(again.named_weights(), config, world, 6)
    for key, part in resumed.allocate_state(saved, num_steps=3).items():
        part.local.copy_(saved[key])
    run(again, resumed, (3, 4))
    assert resumed.lr == optimizer.lr
    for key, weight in weights(policy).items():
        assert torch.equal(weight, weights(again)[key])
