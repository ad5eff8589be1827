"""Kernels of packed attention, and the choice of one when a model is loaded."""

import logging
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PretrainedConfig

from agentrl.workers.attention_flash import (
    CpuFlash,
    FlashBackend,
    JoinedAttention,
    VarlenFlash,
    batched,
)
from agentrl.workers.attention_plan import AttentionPlan

logger = logging.getLogger(__name__)


@runtime_checkable
class PackedKernel(Protocol):
    """Attention of packed tokens."""

    name: str
    shares: bool
    """Whether shared prefixes are fast."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Attend as the plan says.

        Args:
            query: `[S, H, D]`.
            key: `[S, H_kv, D]`.
            value: `[S, H_kv, D_v]`.
            plan: Who attends to whom.
            window: Tokens that a query sees, with its own; None: all. Segments that share a prefix
                are not longer.
            scale: Factor of the scores.

        Returns:
            `[S, H, D_v]`.
        """
        ...


class FlashKernel:
    """Packed attention by the calls of a flash kernel."""

    shares = True

    def __init__(self, name: str, flash: FlashBackend) -> None:
        self.name = name
        self.flash = flash

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Attend as the plan says."""
        # The kernels have one size for keys and values; a smaller value is filled up with zeros.
        size = value.shape[-1]
        value = pad(value, (0, query.shape[-1] - size)) if size < query.shape[-1] else value
        known, at = plan.cache, (self.name, window, query.dtype, query.device)
        calls = known.get(at)
        if calls is None:
            calls = known[at] = self.flash.calls(plan, window, query)
        out: Any = JoinedAttention.apply(query, key, value, self.flash, calls, scale)
        return out[..., :size]


class FlexKernel:
    """`flex_attention`, compiled on CUDA."""

    name = "flex_attention"
    shares = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Attend as the plan says."""
        at = (self.name, window, query.device)
        mask = plan.cache.get(at)
        if mask is None:
            sees, size = plan.see(window, query.device), plan.ends[-1]
            mask = create_block_mask(sees, None, None, size, size, device=str(query.device))
            plan.cache[at] = mask
        attend = _compiled_flex() if query.is_cuda else flex_attention
        query, key, value = map(batched, (query, key, value))
        out: Any = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


class SdpaKernel:
    """One call of PyTorch's attention for each sequence, with a mask for shared prefixes.

    The reference of the others, and the only one with dropout.
    """

    name = "scaled_dot_product_attention"
    shares = False

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Attend as the plan says."""
        lengths = [plan.ends[-1]] if plan.generations else list(plan.lengths)
        parts = list[Tensor]()
        for q, k, v in zip(*(one.split(lengths) for one in (query, key, value)), strict=True):
            mask = None
            if plan.generations:
                mask = plan.visible(window, query.device)
            elif window is not None and len(q) > window:
                mask = AttentionPlan((len(q),)).visible(window, query.device)
            parts.append(
                scaled_dot_product_attention(
                    *map(batched, (q, k, v)), attn_mask=mask, is_causal=mask is None,
                    dropout_p=self.dropout, scale=scale, enable_gqa=True,
                )
            )  # fmt: skip
        return torch.cat(parts, dim=2)[0].transpose(0, 1)


_PROBED = AttentionPlan((24, 9, 40, 3, 17, 30), (-1, 0, 0, 2, 2, -1))


def choose_kernel(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> PackedKernel:
    """Return the first kernel that works on the device and equals the reference, and report it.

    Args:
        config: The model's; its numbers of heads are read.
        device: Of the run.
        dtype: Of the layers.
    """
    candidates: list[PackedKernel] = (
        [FlashKernel("varlen", VarlenFlash()), FlexKernel()]
        if device.type == "cuda"
        else [FlashKernel("flash", CpuFlash())]
    )
    failed = list[str]()
    for kernel in candidates:
        try:
            distance = _distance_to_reference(kernel, config, device, dtype)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            failed.append(f"{kernel.name} fails ({' '.join(str(error).split())[:100]})")
            continue
        if distance < (1e-4 if dtype == torch.float32 else 5e-2):
            break
        failed.append(f"{kernel.name} differs by {distance:.1e}")
    else:
        kernel = SdpaKernel()
    report = logger.warning if failed else logger.info
    report("packed attention on %s: %s%s", device, kernel.name, "".join(f"; {x}" for x in failed))
    return kernel


def _distance_to_reference(
    kernel: PackedKernel, config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest difference of results and gradients, for random inputs and both masks."""
    heads = getattr(config, "num_attention_heads", None) or 1
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    draw = torch.Generator().manual_seed(0)
    shapes = [(_PROBED.ends[-1], count, size) for count in (heads, groups, groups, heads)]
    query, key, value, weight = (torch.randn(one, generator=draw) for one in shapes)

    def run(one: PackedKernel, plan: AttentionPlan, window: int | None) -> list[Tensor]:
        inputs = [part.to(device, dtype).requires_grad_() for part in (query, key, value)]
        out = one(inputs[0], inputs[1], inputs[2], plan, window, size**-0.5)
        grads = torch.autograd.grad(out, inputs, weight.to(out))
        return [out.detach(), *grads]

    apart = 0.0
    with torch.enable_grad():
        for plan, window in ((_PROBED, None), (AttentionPlan(_PROBED.lengths), 8)):
            for found, expected in zip(
                run(kernel, plan, window), run(SdpaKernel(), plan, window), strict=True
            ):
                difference = (found.float() - expected.float()).abs().max()
                apart = max(apart, float(difference / expected.float().abs().max()))
    return apart
