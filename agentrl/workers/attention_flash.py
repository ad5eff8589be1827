"""Packed attention by several calls of a flash kernel, joined in both passes.

A flash kernel computes the attention of some queries over some keys, and the logsumexp of the
scores. Attention over two sets of keys (a sequence's own, and those of the prefix that it shares)
is their mean, weighted by the sums of the exponentials. The backward pass of a flash kernel reads
only the result and its logsumexp; with those of all keys, each call gives its share of the
gradients.

Shape key: S packed tokens, s of one call, H heads (fewer of keys and values), D size of a head.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.workers.attention_plan import AttentionPlan

WINDOW_BLOCK = 256
"""Queries of one call under a sliding window, which has all keys that they see."""


class FlashCall(NamedTuple):
    """One call of a flash kernel."""

    queries: slice | Tensor
    keys: slice | Tensor
    causal: bool
    is_first: bool
    """Whether these queries have no result yet."""
    detail: Any = None
    """What only the kernel reads."""


class FlashBackend(Protocol):
    """Attention of `[s, H, D]` queries, which returns the logsumexp and can be differentiated."""

    def calls(self, plan: AttentionPlan, window: int | None, like: Tensor) -> list[FlashCall]:
        """Return the calls that cover the plan."""
        ...

    def attend(
        self, call: FlashCall, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result `[s, H, D]` and the logsumexp `[H, s]`, float32."""
        ...

    def differentiate(
        self,
        call: FlashCall,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, given the result over all keys."""
        ...


class CpuFlash:
    """PyTorch's flash kernel for a CPU: one call for each segment, and each shared prefix."""

    def calls(self, plan: AttentionPlan, window: int | None, like: Tensor) -> list[FlashCall]:
        """Return one call for each segment, or more for those longer than the window."""
        found = list[FlashCall]()
        for start, end in zip(plan.starts, plan.ends, strict=True):
            if window is None or end - start <= window:
                own = slice(start, end)
                found.append(FlashCall(own, own, causal=True, is_first=True))
            else:
                found += _window_calls(start, end, window, like.dtype)
        for segment in (segment for one in plan.generations for segment in one):
            below = slice(plan.ends[segment], plan.family_ends[segment])
            above = slice(plan.starts[segment], plan.ends[segment])
            found.append(FlashCall(below, above, causal=False, is_first=False))
        return found

    def attend(
        self, call: FlashCall, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Call the kernel."""
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(batched, (query, key, value)), 0.0, call.causal,
            attn_mask=call.detail, scale=scale,
        )  # fmt: skip
        return out[0].transpose(0, 1), logsumexp[0]

    def differentiate(
        self,
        call: FlashCall,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the kernel's backward pass."""
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(batched, (grad, *inputs, result[0])), result[1][None], 0.0, call.causal,
            attn_mask=call.detail, scale=scale,
        )  # fmt: skip
        by_query, by_key, by_value = (one[0].transpose(0, 1) for one in grads)
        return by_query, by_key, by_value


def batched(tensor: Tensor) -> Tensor:
    """View `[s, H, D]` as `[1, H, s, D]`."""
    return tensor.transpose(0, 1)[None]


def _window_calls(start: int, end: int, window: int, dtype: torch.dtype) -> Iterator[FlashCall]:
    mask = _window_mask(window, dtype)
    for first in range(start, end, WINDOW_BLOCK):
        queries = slice(first, min(first + WINDOW_BLOCK, end))
        keys = slice(max(start, first - window + 1), queries.stop)
        skipped = keys.start - (first - window + 1)
        part = mask[: queries.stop - first, skipped : skipped + keys.stop - keys.start]
        yield FlashCall(queries, keys, causal=False, is_first=True, detail=part)


@lru_cache(maxsize=8)
def _window_mask(window: int, dtype: torch.dtype) -> Tensor:
    """Return what a block of queries adds to its scores; the first key is `window - 1` before."""
    queries = torch.arange(WINDOW_BLOCK)[:, None] + window - 1
    distance = queries - torch.arange(WINDOW_BLOCK + window - 1)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class VarlenFlash:
    """PyTorch's flash kernel for CUDA: one call for all segments, one for each generation.

    The operators are those of `torch.nn.attention.varlen`.
    """

    def calls(self, plan: AttentionPlan, window: int | None, like: Tensor) -> list[FlashCall]:
        """Return the calls with the boundaries of their sequences."""
        everything = slice(0, plan.ends[-1])
        size = -1 if window is None else window - 1
        own = _Bounds.of(plan.lengths, plan.lengths, like.device, size)
        found = [FlashCall(everything, everything, causal=True, is_first=True, detail=own)]
        for segments in plan.generations:
            below = [(plan.ends[one], plan.family_ends[one]) for one in segments]
            above = [(plan.starts[one], plan.ends[one]) for one in segments]
            bounds = _Bounds.of(
                [end - start for start, end in below],
                [end - start for start, end in above],
                like.device,
                -1,
            )
            places = _places(below, like.device), _places(above, like.device)
            found.append(FlashCall(*places, causal=False, is_first=False, detail=bounds))
        return found

    def attend(
        self, call: FlashCall, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Call the kernel."""
        bounds: _Bounds = call.detail
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *bounds.ends, *bounds.longest, 0.0, call.causal,
            return_debug_mask=False, scale=scale, **bounds.window(call.causal),
        )  # fmt: skip
        return out, logsumexp

    def differentiate(
        self,
        call: FlashCall,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the kernel's backward pass."""
        bounds: _Bounds = call.detail
        # Read only with dropout.
        seed = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        unused = torch.empty(0, device=grad.device)
        return torch.ops.aten._flash_attention_backward(
            grad, *inputs, *result, *bounds.ends, *bounds.longest, 0.0, call.causal,
            seed, unused, scale=scale, **bounds.window(call.causal),
        )  # fmt: skip


class _Bounds(NamedTuple):
    """The boundaries of the sequences of one call."""

    ends: tuple[Tensor, Tensor]
    """Of queries and of keys: 0, then the end of each sequence; int32."""
    longest: tuple[int, int]
    """The longest sequence of queries, and of keys."""
    size: int
    """Earlier tokens that a query sees besides its own; -1: all."""

    @classmethod
    def of(cls, queries: Any, keys: Any, device: torch.device, size: int) -> "_Bounds":
        ends = (_cumulated(queries, device), _cumulated(keys, device))
        return cls(ends, (max(queries), max(keys)), size)

    def window(self, causal: bool) -> dict[str, int]:
        return {"window_size_left": self.size, "window_size_right": 0 if causal else -1}


def _cumulated(lengths: Any, device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return ends.to(device)


def _places(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in spans]).to(device)


class JoinedAttention(torch.autograd.Function):
    """The calls of a plan, joined by their logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: FlashBackend,
        calls: list[FlashCall],
        scale: float,
    ) -> Tensor:
        """Attend to each set of keys, and weight the results."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        total = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        for call in calls:
            rows = call.queries
            part, mass = kernel.attend(call, query[rows], key[call.keys], value[call.keys], scale)
            if call.is_first:
                out[rows], total[:, rows] = part, mass
                continue
            before = total[:, rows]
            share = torch.sigmoid(mass - before).T.unsqueeze(2).to(out.dtype)
            out[rows] = torch.lerp(out[rows], part, share)
            total[:, rows] = torch.logaddexp(before, mass)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.kernel, ctx.calls, ctx.scale = kernel, calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - of the decorator's type
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Add the gradients of the calls."""
        query, key, value, out, total = ctx.saved_tensors
        whole = all(call.keys == call.queries for call in ctx.calls if call.is_first)
        make = torch.empty_like if whole else torch.zeros_like
        grads = make(query), make(key), make(value)
        for call in ctx.calls:
            rows, keys = call.queries, call.keys
            parts = ctx.kernel.differentiate(
                call,
                grad[rows],
                (query[rows], key[keys], value[keys]),
                (out[rows], total[:, rows]),
                ctx.scale,
            )
            for grad_of, part, index in zip(grads, parts, (rows, keys, keys), strict=True):
                if whole and call.is_first:
                    grad_of[index] = part
                else:
                    grad_of[index] += part
        return (*grads, None, None, None)
