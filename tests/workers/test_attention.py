import pytest
import torch
from transformers import Qwen2Config

from agentrl.errors import ConfigError
from agentrl.workers.attention import PACKED_ATTENTION, check_packable
from agentrl.workers.attention_plan import AttentionPlan
from agentrl.workers.distributed import World
from agentrl.workers.load import enable_checkpointing
from tests.fakes.engines import VOCAB_SIZE, tiny_model

LENGTHS = (7, 12, 1, 3)


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"num_key_value_heads": 4},
    ],
    ids=["full", "sliding", "no grouped queries"],
)
def test_layout_is_invisible_packed_equals_every_row_alone(world: World, overrides: dict):
    alone, packed = tiny_model(**overrides), tiny_model(**overrides)
    packed.set_attn_implementation(PACKED_ATTENTION)
    ids, positions = packed_inputs()
    hidden = packed.model(
        input_ids=ids,
        position_ids=positions,
        use_cache=False,
        attention_plan=AttentionPlan(LENGTHS),
    ).last_hidden_state
    parts = [
        alone.model(input_ids=part, use_cache=False).last_hidden_state
        for part in ids.split(list(LENGTHS), dim=1)
    ]
    expected = torch.cat(parts, dim=1)
    assert torch.allclose(hidden, expected, atol=1e-5)
    hidden.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_nothing(world: World):
    grads = []
    for checkpointed in (False, True):
        model = tiny_model().train()
        model.set_attn_implementation(PACKED_ATTENTION)
        if checkpointed:
            enable_checkpointing(model)
        ids, positions = packed_inputs()
        plan = AttentionPlan(LENGTHS)
        out = model.model(
            input_ids=ids, position_ids=positions, use_cache=False, attention_plan=plan
        )
        out.last_hidden_state.square().sum().backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_model_that_hands_no_plan_down_is_refused(world: World):
    model = tiny_model()
    model.set_attn_implementation(PACKED_ATTENTION)
    with pytest.raises(ConfigError, match="does not pass the attention plan"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_layers_that_mix_tokens_otherwise_are_refused():
    config = Qwen2Config(num_hidden_layers=1)
    check_packable(config)
    config.layer_types = ["linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        check_packable(config)
