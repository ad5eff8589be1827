"""The ranks that compute a sequence together divide the model's heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import CriticModelConfig, FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.distributed import World
from agentrl.workers.load import load_policy
from agentrl.workers.sequence_parallel import check_heads
from agentrl.workers.value_model import load_value_model


def config_of(heads: int, key_heads: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=key_heads
    )


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks"), [(8, 2, 2), (8, 2, 4), (8, 2, 8), (6, 6, 3), (6, 2, 6)]
)
def test_heads_that_ranks_can_divide_are_accepted(heads: int, key_heads: int, ranks: int):
    check_heads(config_of(heads, key_heads), ranks)


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "usable"),
    [(4, 2, 8, "1 or 2 or 4"), (6, 6, 4, "1 or 2 or 3 or 6"), (12, 4, 3, "1 or 2 or 4 or 12")],
    ids=["fewer heads", "no divisor", "no divisor of key heads"],
)
def test_heads_that_ranks_cannot_divide_are_refused(
    heads: int, key_heads: int, ranks: int, usable: str
):
    with pytest.raises(ConfigError, match=f"{heads} of queries, {key_heads} of keys") as caught:
        check_heads(config_of(heads, key_heads), ranks)
    assert caught.value.key == "actor.ulysses_sequence_parallel_size"
    assert caught.value.expected == usable


class Group:
    """A group of four ranks that never exchanges anything."""

    def size(self) -> int:
        return 4


def test_heads_are_checked_before_weights_are_read(world: World, tmp_path: Path):
    config_of(heads=2, key_heads=1).save_pretrained(tmp_path)  # a folder without weights
    group: Any = Group()
    model, together = ModelConfig(path=str(tmp_path)), replace(world, size=4, sequence_group=group)
    with pytest.raises(ConfigError, match="cannot divide the heads"):
        load_policy(model, together, FsdpConfig())
    with pytest.raises(ConfigError, match="cannot divide the heads") as caught:
        load_value_model(CriticModelConfig(), model, together, FsdpConfig())
    assert caught.value.key == "critic.ulysses_sequence_parallel_size"
