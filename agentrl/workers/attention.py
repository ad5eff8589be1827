"""Attention within each of several packed sequences, without a mask.

The linear layers of a model run on the packed `[1, S]` tokens; only attention reads the plan, which
says which tokens belong together.

The plan is a keyword argument of the model's forward pass. transformers passes it to every layer,
also when gradient checkpointing recomputes a layer (a context variable would be lost there: on CUDA
the backward pass runs in another thread).
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from agentrl.engines.model_config import PLAIN_LAYERS, read_attribute, read_per_layer
from agentrl.errors import ConfigError
from agentrl.workers.attention_kernels import AttentionInputs, PackedKernel, SdpaKernel
from agentrl.workers.attention_plan import AttentionPlan
from agentrl.workers.sequence_parallel import SequenceShard

PACKED_ATTENTION = "agentrl_packed"
"""The name under which transformers knows this attention."""

_NOISE = re.compile("drop(?!ping)|jitter|pdrop")


def check_packable(config: PretrainedConfig) -> None:
    """Refuse a model whose layers mix tokens by anything but plain attention.

    Args:
        config: Of the language part.

    Raises:
        ConfigError: for recurrent or linear layers, and for capped attention logits.
    """
    found = set(read_attribute(config, "layer_types", ())) - PLAIN_LAYERS - {"attention"}
    if found or any(read_per_layer(config, "attn_logit_softcapping", None)):
        what = ", ".join(sorted(found)) or "attn_logit_softcapping"
        raise ConfigError(
            f"{config.model_type}: packed training cannot keep sequences apart in {what}",
            key="model.path",
            expected="a model of full or sliding-window attention",
        )


def max_sharing_length(lm: PreTrainedModel, kernel: PackedKernel) -> int:
    """Return the most tokens of a sequence that may share a prefix with others; 0: none may.

    A longer sequence than the sliding window does not attend to its whole prefix.
    """
    if not kernel.shares:
        return 0
    layers = read_attribute(lm.config, "layer_types", ["sliding_attention"])
    windows = read_per_layer(lm.config, "sliding_window", None)
    given = [window for window in windows if isinstance(window, int)]
    return min(given, default=sys.maxsize) if "sliding_attention" in layers else sys.maxsize


def find_noise(overrides: Mapping[str, Any]) -> list[str]:
    """Return the keys of `override_config` that make the update of a model draw random numbers."""
    found = [key for key, value in overrides.items() if value and _NOISE.search(key)]
    parts = [one for one in overrides.values() if isinstance(one, dict)]
    return found + [key for one in parts for key in find_noise(one)]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend as the plan says (the attention interface of transformers).

    Args:
        module: The attention layer that calls.
        query: `[1, H, S, D]`.
        key: `[1, H_kv, S, D]`.
        value: `[1, H_kv, S, D_v]`.
        attention_mask: Always None; the plan replaces it.
        scaling: Factor of the attention scores; None: 1 / sqrt(D).
        dropout: Share of attention weights dropped in training.
        **kwargs: `attention_plan`, `attention_kernel`, `sequence_shard`, `sliding_window`, and
            arguments of other implementations.

    Returns:
        `[1, S, H, D_v]`, and no attention weights.
    """
    plan, kernel = kwargs.get("attention_plan"), kwargs.get("attention_kernel")
    if not isinstance(plan, AttentionPlan):
        raise ConfigError(
            f"{type(module).__name__} does not pass the attention plan to its attention function",
            key="model.path",
            expected="a model whose layers pass keyword arguments on to the attention interface",
        )
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise ConfigError(
            f"{type(module).__name__} uses attention sinks or capped scores, which packed "
            "attention does not have",
            key="model.path",
        )
    found = kwargs.get("sliding_window")
    window = found if isinstance(found, int) and found < plan.longest else None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if dropout or not isinstance(kernel, PackedKernel):
        kernel = SdpaKernel(dropout)
    parts = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    shard = kwargs.get("sequence_shard")
    if not isinstance(shard, SequenceShard):
        return kernel(AttentionInputs(*parts, plan=plan, window=window, scale=scale))[None], None
    parts = map(shard.scatter_heads, parts)
    out = kernel(AttentionInputs(*parts, plan=plan, window=window, scale=scale))
    return shard.gather_heads(out)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
