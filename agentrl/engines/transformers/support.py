"""Whether the embedded engine can run a model, found by its structure before weights are read.

The engine's cache has one width of keys and values for all layers, and holds nothing else. A model
without memory is run once on two tokens, with an attention function that records what each layer
would write to the cache.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.model_config import PLAIN_LAYERS, find_length_border, read_attribute
from agentrl.engines.vision import has_vision, language_model, run_body
from agentrl.errors import ConfigError

_RECORDER = "agentrl_recorder"


class _Layer(NamedTuple):
    """What a layer gives to its attention function."""

    layer: int
    keys: tuple[int, int]
    """Heads, and numbers of each."""
    values: tuple[int, int]
    extras: tuple[str, ...]
    """What else changes its scores."""


def check_embedded(config: PretrainedConfig) -> None:
    """Refuse a model that the embedded engine cannot run.

    Args:
        config: The model's.

    Raises:
        ConfigError: with the reason, and the engine that can.
    """
    if (reason := _find_reason(config)) is not None:
        raise ConfigError(
            f"the embedded engine cannot sample from a {config.model_type}: {reason}",
            key="model.path",
            expected="rollout.engine.name=sglang, or a model with plain attention in every layer",
        )


def _find_reason(config: PretrainedConfig) -> str | None:
    if others := set(read_attribute(config, "layer_types", ())) - PLAIN_LAYERS - {"attention"}:
        return f"it has layers of the type {', '.join(sorted(others))}"
    lm = _make_skeleton(config)
    if any(isinstance(one, nn.Conv1d) for one in language_model(lm).modules()):
        return "it has layers with a recurrent state"
    layers = _record_layers(lm)
    if layers is None:
        return None  # not computable without memory: the first step shows it
    if {layer.layer for layer in layers} != set(range(read_attribute(config, "num_hidden_layers"))):
        return "layers compute attention by code of their own, which does not read the paged cache"
    if extras := sorted({extra for layer in layers for extra in layer.extras}):
        return f"its attention has {' and '.join(extras)}"
    _, heads, width = AttentionShape.widest(config)
    sizes = {size for layer in layers for size in (layer.keys, layer.values)}
    if sizes != {(heads, width)}:
        found = " and ".join(f"{number} x {size}" for number, size in sorted(sizes))
        return f"keys and values of {found} numbers do not fit into its cache of {heads} x {width}"
    return None


def _make_skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Make a model without memory, and without parts that depend on values."""
    config = copy.deepcopy(config)
    rope = read_attribute(config, "rope_parameters", {})
    for part in (rope, *(one for one in rope.values() if isinstance(one, dict))):
        if find_length_border(config) is not None and "rope_type" in part:
            part["rope_type"] = "default"
    kind: Any = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    with torch.device("meta"):
        lm: PreTrainedModel = kind.from_config(config)
    for module in lm.modules():
        if type(module).__name__.endswith("Experts"):  # which of them compute depends on values
            module.forward = lambda hidden, *_, **__: hidden
    return lm


def _record_layers(lm: PreTrainedModel) -> Sequence[_Layer] | None:
    """Run the language part; None if that is not possible without memory."""
    layers: list[_Layer] = []
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    if not lm._supports_attention_backend:
        return layers
    try:
        lm.set_attn_implementation(_RECORDER)
        with torch.no_grad():
            run_body(lm, ids, ids, attention_record=layers)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    return layers


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Record a layer (the attention interface of transformers), and return numbers of its shape."""
    given = {"attention sinks": kwargs.get("s_aux"), "capped scores": kwargs.get("softcap")}
    extras = tuple(name for name, what in given.items() if what is not None)
    sizes = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
    kwargs.get("attention_record", []).append(_Layer(module.layer_idx, *sizes, extras))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_RECORDER, _record)
