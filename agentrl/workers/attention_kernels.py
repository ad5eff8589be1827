"""Kernels of packed attention, and the choice of one when a model is loaded."""

import logging
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PretrainedConfig

from agentrl.engines.attention_shape import AttentionShape
from agentrl.workers.attention_flash import (
    CpuFlash,
    FlashBackend,
    JoinedAttention,
    VarlenFlash,
    batched,
)
from agentrl.workers.attention_plan import AttentionPlan

logger = logging.getLogger(__name__)


class AttentionInputs(NamedTuple):
    """Packed tokens, and who attends to whom."""

    query: Tensor
    """`[S, H, D]`."""
    key: Tensor
    """`[S, H_kv, D]`."""
    value: Tensor
    """`[S, H_kv, D_v]`."""
    plan: AttentionPlan
    window: int | None
    """Tokens that a query sees, with its own; None: all. Segments that share a prefix are not
    longer."""
    scale: float
    """Factor of the scores."""


@runtime_checkable
class PackedKernel(Protocol):
    """Attention of packed tokens."""

    name: str
    shares: bool
    """Whether shared prefixes are fast."""

    def __call__(self, given: AttentionInputs) -> Tensor:
        """Attend as the plan says; returns `[S, H, D_v]`."""
        ...


class FlashKernel:
    """Packed attention by the calls of a flash kernel."""

    shares = True

    def __init__(self, name: str, flash: FlashBackend) -> None:
        self.name = name
        self.flash = flash

    def __call__(self, given: AttentionInputs) -> Tensor:
        """Attend as the plan says."""
        query, key, value, plan, window, scale = given
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

    def __call__(self, given: AttentionInputs) -> Tensor:
        """Attend as the plan says."""
        query, key, value, plan, window, scale = given
        at = (self.name, window, query.device)
        mask = plan.cache.get(at)
        if mask is None:
            mask = plan.cache[at] = make_block_mask(plan, window, query.device)
        attend = _compiled_flex() if query.is_cuda else flex_attention
        query, key, value = map(batched, (query, key, value))
        out: Any = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def make_block_mask(
    plan: AttentionPlan, window: int | None, device: torch.device, *, block_size: int = 128
) -> BlockMask:
    """Return what `create_block_mask` does, without a table of all pairs of tokens.

    A block of queries may have keys that it only masks, if a window ends within a shared prefix.
    """
    size = plan.ends[-1]
    num_blocks = -(-size // block_size)
    first = torch.arange(num_blocks, device=device) * block_size
    last = first + block_size - 1
    lengths = torch.tensor([*plan.lengths, num_blocks * block_size - size], device=device)
    until = torch.tensor([*plan.family_ends, size], device=device).repeat_interleave(lengths)
    until = until.view(num_blocks, block_size)
    below = first[:, None] > first  # [query blocks, key blocks]
    some = below & (until.amax(1) > first[:, None])
    every = below & (until.amin(1) > last[:, None])
    if window is not None:
        # At most the distance in a sequence, and less only in one that shares a prefix.
        every &= last[:, None] - first < window
        if not plan.generations:
            some &= first[:, None] - last < window
    some |= torch.eye(num_blocks, dtype=torch.bool, device=device)
    some &= ~every

    def in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
        index = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1, dtype=torch.int32)[None, None], index.int()[None, None]

    return BlockMask.from_kv_blocks(
        *in_order(some),
        *in_order(every),
        BLOCK_SIZE=block_size,
        mask_mod=plan.see(window, device),
        seq_lengths=(size, size),
    )


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

    def __call__(self, given: AttentionInputs) -> Tensor:
        """Attend as the plan says."""
        query, key, value, plan, window, scale = given
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
    # A model without heads does not call the kernel; it is refused for mixing sequences.
    has_heads = hasattr(config.get_text_config(), "num_attention_heads")
    shape = AttentionShape.widest(config) if has_heads else AttentionShape(1, 1, 16)
    heads, groups, size = shape
    draw = torch.Generator().manual_seed(0)
    shapes = [(_PROBED.ends[-1], count, size) for count in (heads, groups, groups, heads)]
    query, key, value, weight = (torch.randn(one, generator=draw) for one in shapes)

    def run(one: PackedKernel, plan: AttentionPlan, window: int | None) -> list[Tensor]:
        parts = [part.to(device, dtype).requires_grad_() for part in (query, key, value)]
        out = one(AttentionInputs(*parts, plan=plan, window=window, scale=size**-0.5))
        grads = torch.autograd.grad(out, parts, weight.to(out))
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
