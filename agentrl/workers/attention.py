"""Attention within each of several packed sequences, without a mask.

The linear layers of a model run on the packed `[1, S]` tokens; only attention is split into the
sequences. Measured on a CPU against padded sequences: equally fast for equal lengths, and up to 1.6
times as fast for ragged ones.

The plan is a keyword argument of the model's forward pass. transformers passes it to every layer,
also when gradient checkpointing recomputes a layer (a context variable would be lost there: on CUDA
the backward pass runs in another thread).
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from agentrl.errors import ConfigError

PACKED_ATTENTION = "agentrl_packed"
"""The name under which transformers knows this attention."""

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The boundaries of the packed sequences."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, in packed order."""

    @property
    def ends(self) -> list[int]:
        """The packed position after each sequence."""
        return list(accumulate(self.lengths))


def check_packable(config: PretrainedConfig) -> None:
    """Refuse a model whose layers mix tokens by anything but plain attention.

    Raises:
        ConfigError: for recurrent or linear layers, and for capped attention logits.
    """
    found = set(getattr(config, "layer_types", None) or []) - _SUPPORTED_LAYERS
    if found or getattr(config, "attn_logit_softcapping", None):
        what = ", ".join(sorted(found)) or "attn_logit_softcapping"
        raise ConfigError(
            f"{config.model_type}: packed training cannot keep sequences apart in {what}",
            key="model.path",
            expected="a model of full or sliding-window attention",
        )


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
    """Attend causally within each sequence of the plan (the attention interface of transformers).

    Args:
        module: The attention layer that calls.
        query: `[1, H, S, D]`.
        key: `[1, H_kv, S, D]`.
        value: `[1, H_kv, S, D]`.
        attention_mask: Always None; the plan replaces it.
        scaling: Factor of the attention scores; None: 1 / sqrt(D).
        dropout: Share of attention weights dropped in training.
        **kwargs: `attention_plan`, `sliding_window`, and arguments of other implementations.

    Returns:
        `[1, S, H, D]`, and no attention weights.
    """
    plan = kwargs.get("attention_plan")
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
    window = found if isinstance(found, int) else None
    split = (tensor.split(list(plan.lengths), dim=2) for tensor in (query, key, value))
    parts = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, enable_gqa=True, **_causal(q, window)
        )
        for q, k, v in zip(*split, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(query: Tensor, window: int | None) -> dict[str, Any]:
    """Return the arguments for causal attention within the window."""
    length = query.shape[2]
    if window is None or length <= window:
        return {"is_causal": True}
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    return {"attn_mask": (distance >= 0) & (distance < window)}


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
