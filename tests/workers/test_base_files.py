"""What older programs read in the config.json of an export: the rotary values of the model."""

import json
from copy import deepcopy
from typing import Any

import pytest
from transformers import PretrainedConfig, Qwen2_5_VLConfig, Qwen2VLConfig

from agentrl.workers.base_files import complete_config

ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
FLAT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 200_000, "rope_theta": 1e6, "rope_scaling": ROPE,
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("kind", [Qwen2VLConfig, Qwen2_5_VLConfig])
@pytest.mark.parametrize("theta", [1e6, 5e5])
@pytest.mark.parametrize("is_flat", [True, False])
def test_the_older_rotary_keys_have_the_values_of_the_model(
    kind: type[PretrainedConfig], theta: float, is_flat: bool
):
    """The files of these families have the keys of the language part at the top."""
    base = deepcopy(FLAT) | {"model_type": kind.model_type}
    if not is_flat:
        text = {key: base.pop(key) for key in FLAT if key != "vision_config"}
        base["text_config"] = text
    config = kind.from_dict(json.loads(json.dumps(base)))
    config.text_config.rope_parameters["rope_theta"] = theta
    done = complete_config(config.to_diff_dict(), base, config, is_tied=False)
    for part in [done, done["text_config"]] if is_flat else [done["text_config"]]:
        assert part["rope_theta"] == theta
        assert part["rope_scaling"].items() >= ROPE.items()
    again = kind.from_dict({key: value for key, value in done.items() if key != "rope_parameters"})
    assert again.text_config.rope_parameters["rope_theta"] == theta
