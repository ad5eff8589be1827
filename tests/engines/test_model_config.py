"""Attributes of configurations: those of each layer, those that are missing, rotary borders."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config

from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.model_config import (
    check_lengths,
    find_length_border,
    read_attribute,
    read_per_layer,
)
from agentrl.errors import ConfigError
from tests.fakes.families import FAMILIES, LLAMA3, LONGROPE, SIZES, YARN

PER_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
             "intermediate_size", "max_position_embeddings", "num_experts_per_tok")  # fmt: skip


@given(st.sampled_from(PER_LAYER), st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_attribute_is_read_of_each_layer_and_refused_only_where_one_is_needed(
    name: str, values: list[int]
):
    layers = {index: {name: 8 * value} for index, value in enumerate(values)}
    config = LlamaConfig(**SIZES | {"num_hidden_layers": len(values), name: 8})
    config.per_layer_config = layers
    expected = [8 * value for value in values]
    found = read_per_layer(config, name)
    assert (found * len(values) if len(found) == 1 else found) == expected
    if len(set(values)) == 1:
        assert read_attribute(config, name) == expected[0]
    else:
        with pytest.raises(ConfigError, match=f"layers of different {name}: ") as caught:
            read_attribute(config, name)
        assert caught.value.key == "model.path"


def test_missing_attribute_names_the_model_and_its_key():
    with pytest.raises(ConfigError, match="a bloom configuration has no 'max_position") as caught:
        read_attribute(BloomConfig(), "max_position_embeddings")
    assert caught.value.key == "model.path"
    assert read_attribute(BloomConfig(), "max_position_embeddings", 7) == 7


def test_heads_are_those_of_each_layer():
    released = FAMILIES["gemma4_released"].config()
    assert AttentionShape.of_layers(released) == [(4, 2, 8), (4, 1, 16)]
    assert AttentionShape.widest(released) == (4, 1, 16)
    assert AttentionShape.of_layers(Qwen2Config(**SIZES)) == [(4, 2, 8)] * 2


def rope(kind: str, **rest: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **rest}


BORDERS = [
    ("default", {"rope_type": "default", "rope_theta": 1e4}, None),
    ("linear", rope("linear"), None),
    ("yarn", YARN, None),
    ("llama3", LLAMA3, None),
    ("dynamic", rope("dynamic"), 256),
    ("longrope", LONGROPE, 64),
]


@pytest.mark.parametrize(("kind", "given", "border"), BORDERS, ids=[one[0] for one in BORDERS])
def test_border_is_where_a_longer_row_of_the_batch_changes_a_short_one(
    kind: str, given: dict[str, Any], border: int | None
):
    config = LlamaConfig(**SIZES, rope_parameters=given)
    assert find_length_border(config) == border
    torch.manual_seed(0)
    rotary = LlamaForCausalLM(config).model.rotary_emb

    def short_row(longest: int) -> torch.Tensor:
        positions = torch.tensor([[0, 1, 2, 3], [0, 1, 2, longest - 1]])
        return torch.stack(rotary(torch.zeros(2, 4, 32), positions))[:, 0]

    alone = short_row(4)
    for longest in (16, 63, 64, 65, 128, 255, 256, 257, 400):
        is_equal = torch.equal(short_row(longest), alone)
        assert is_equal == (border is None or longest <= border), longest


def test_border_of_a_part_of_the_layers_counts():
    parts = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    config = Gemma3TextConfig(**SIZES, head_dim=8, rope_parameters=parts)
    assert find_length_border(config) == 64


def test_run_whose_rows_may_be_on_both_sides_of_a_border_is_refused():
    config = FAMILIES["phi3_longrope"].config()
    check_lengths(config, 64, key="model.path", lengths="rollout.max_model_len")
    with pytest.raises(ConfigError, match="more than 64 tokens, and the run allows 65") as caught:
        check_lengths(config, 65, key="ref.path", lengths="rollout.max_model_len")
    assert caught.value.key == "ref.path"
    assert "rollout.max_model_len of at most 64" in str(caught.value.expected)
