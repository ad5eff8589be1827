"""A model that mixes the sequences of a micro-batch is refused when it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.distributed import World
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PackedBatch
from agentrl.workers.packing_probe import find_probe_length, measure_crossing
from tests.fakes.engines import tiny_model

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
USUAL: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_attention_heads": 2}
MIXING: list[tuple[type[PreTrainedModel], Any]] = [
    (FalconForCausalLM, FalconConfig(**SIZES, num_attention_heads=2)),
    (BloomForCausalLM, BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)),
    (MptForCausalLM, MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=99)),
    (RwkvForCausalLM, RwkvConfig(**SIZES, context_length=99)),
]
APART: list[tuple[type[PreTrainedModel], Any]] = [
    (LlamaForCausalLM, LlamaConfig(**USUAL, num_key_value_heads=1)),
    (MistralForCausalLM, MistralConfig(**USUAL, num_key_value_heads=1, sliding_window=4)),
]


def make(kind: type[PreTrainedModel], config: Any, folder: Path) -> ModelConfig:
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("kind", "config"), MIXING, ids=lambda value: getattr(value, "__name__", "")
)
def test_model_whose_sequences_mix_is_refused(
    world: World, tmp_path: Path, kind: type[PreTrainedModel], config: Any
):
    # From transformers 5.24 on, Falcon mixes only sequences that share a prefix.
    how = "(in one micro-batch|that share a prefix)"
    with pytest.raises(ConfigError, match=f"{kind.__name__}: sequences {how} change each other's"):
        load_policy(make(kind, config, tmp_path), world, FsdpConfig())


def test_deep_model_whose_sequences_mix_is_refused_in_bfloat16(world: World, tmp_path: Path):
    config = RwkvConfig(**{**SIZES, "num_hidden_layers": 24}, context_length=99)
    model = make(RwkvForCausalLM, config, tmp_path).model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="sequences in one micro-batch change"):
        load_policy(model, world, FsdpConfig())


@pytest.mark.parametrize(
    ("kind", "config"), APART, ids=lambda value: getattr(value, "__name__", "")
)
def test_model_that_keeps_sequences_apart_is_accepted(
    world: World, tmp_path: Path, kind: type[PreTrainedModel], config: Any
):
    assert load_policy(make(kind, config, tmp_path), world, FsdpConfig()).kernel.shares


def test_shared_prefix_is_compared_too(world: World):
    policy = PolicyModel(tiny_model(initializer_range=0.1), world, torch.float32, FsdpConfig())

    class NoPrefix:
        """A kernel of which a segment does not attend to its parent."""

        name, shares = "no_prefix", True

        def __call__(self, given):
            return kernel(given._replace(plan=type(given.plan)(given.plan.lengths)))

    def score(packed: PackedBatch) -> torch.Tensor:
        return policy(packed, ScoringParams(temperature=1.0)).log_probs

    policy.check_packing(score)
    kernel, policy.kernel = policy.kernel, NoPrefix()
    with pytest.raises(ConfigError, match="sequences that share a prefix change"):
        policy.check_packing(score)


def test_every_row_is_compared():
    def score(packed: PackedBatch) -> torch.Tensor:
        # Scores depend on the number of rows in the last one only.
        return (packed.rows == len(packed.row_index) - 1) * float(len(packed.row_index) - 1)

    found = measure_crossing(score, vocab_size=9, device=torch.device("cpu"), max_sharing_length=0)
    assert found == (2.0, 0.0)


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 2),
        ({"sliding_window": 40}, 42),
        ({"sliding_window": 4, "attention_chunk_size": 70}, 72),
        ({"sliding_window": None, "max_position_embeddings": 32}, 2),
        ({"sliding_window": 40, "max_position_embeddings": 32}, 32),
        ({"sliding_window": 32_768}, 2),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                },
                "max_position_embeddings": 128,
            },
            66,
        ),
    ],
)
def test_probe_is_longer_than_what_the_layers_distinguish(keys: dict[str, Any], length: int):
    assert find_probe_length(LlamaConfig(**USUAL, **keys)) == length


def test_probe_does_not_leave_the_lengths_that_a_run_may_have():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = LlamaConfig(**USUAL, rope_parameters=rope | factors, max_position_embeddings=128)
    assert find_probe_length(config) == 64


def test_a_rule_of_long_batches_is_found(world: World):
    model = tiny_model(initializer_range=0.1)
    policy = PolicyModel(model, world, torch.float32, FsdpConfig())

    def score(packed: PackedBatch) -> torch.Tensor:
        found = policy(packed, ScoringParams(temperature=1.0)).log_probs
        return found * 2 if packed.plan.longest > 64 else found

    policy.check_packing(score)
    policy.config.original_max_position_embeddings = 64
    with pytest.raises(ConfigError, match="sequences in one micro-batch change"):
        policy.check_packing(score)
