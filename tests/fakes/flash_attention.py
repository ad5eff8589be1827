"""FlashAttention on a CPU: torch's operators, and a package `flash_attn`.

As the real ones, `KERNELS` and the package refuse float32.
"""

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, modeling_flash_attention_utils


def check_dtype(tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


class _Part:
    """Queries and keys of one sequence, `[H, s, D]` each, in float32."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, left: int
    ) -> None:
        groups = query.shape[1] // key.shape[1]
        self.query = query.transpose(0, 1).float()
        self.key, self.value = (
            one.transpose(0, 1).float().repeat_interleave(groups, dim=0) for one in (key, value)
        )
        self.scale = scale
        self.scores = self.query @ self.key.transpose(1, 2) * scale
        distance = torch.arange(key.shape[0] - query.shape[0], key.shape[0])[:, None]
        distance = distance - torch.arange(key.shape[0])
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        self.scores.masked_fill_(hidden, -torch.inf)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Return the result `[s, H, D]` and the logsumexp `[H, s]`."""
        return (self.scores.softmax(-1) @ self.value).transpose(0, 1), self.scores.logsumexp(-1)

    def differentiate(self, grad: Tensor, out: Tensor, logsumexp: Tensor) -> list[Tensor]:
        """Return the gradients of query, key and value, `[s, heads, D]` each."""
        grad, out = (one.transpose(0, 1).float() for one in (grad, out))
        weights = (self.scores - logsumexp[:, :, None]).exp()
        by_score = grad @ self.value.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)
        by_score = by_score * weights * self.scale
        grads = (
            by_score @ self.key,
            by_score.transpose(1, 2) @ self.query,
            weights.transpose(1, 2) @ grad,
        )
        return [one.transpose(0, 1) for one in grads]


def _parts(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor],
    longest: tuple[int, int], causal: bool, rest: Any,
) -> Iterator[tuple[slice, slice, _Part]]:  # fmt: skip
    assert all(one.dtype == torch.int32 for one in ends)
    assert [int(one[-1]) for one in ends] == [len(query), len(key)]
    assert tuple(int(one.diff().max()) for one in ends) == longest
    left = rest.get("window_size_left")
    for start, end, key_start, key_end in zip(
        *(one[cut].tolist() for one in ends for cut in (slice(-1), slice(1, None))), strict=True
    ):
        rows, keys = slice(start, end), slice(key_start, key_end)
        yield rows, keys, _Part(
            query[rows], key[keys], value[keys], causal=causal, scale=rest["scale"],
            left=-1 if left is None else left,
        )  # fmt: skip


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor,
    max_q: int, max_k: int, _dropout: float, causal: bool, *_: Any, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `aten::_flash_attention_forward` of packed sequences."""
    ends, longest = (ends_q, ends_k), (max_q, max_k)
    out = torch.empty_like(query)
    logsumexp = torch.empty(query.shape[1], query.shape[0])
    for rows, _keys, part in _parts(query, key, value, ends, longest, causal, rest):
        result, logsumexp[:, rows] = part.attend()
        out[rows] = result.to(out.dtype)
    unused = torch.empty(2, dtype=torch.uint64)
    return out, logsumexp, unused, torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, _dropout: float, causal: bool,
    *_: Any, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `aten::_flash_attention_backward` of packed sequences."""
    ends, longest = (ends_q, ends_k), (max_q, max_k)
    grads = tuple(torch.zeros_like(one) for one in (query, key, value))
    for rows, keys, part in _parts(query, key, value, ends, longest, causal, rest):
        found = part.differentiate(grad[rows], out[rows], logsumexp[:, rows])
        for whole, index, one in zip(grads, (rows, keys, keys), found, strict=True):
            heads = whole.shape[1]
            whole[index] += one.unflatten(1, (heads, -1)).sum(2).to(whole.dtype)
    return grads


def _of_16_bits(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def checked(query: Tensor, *rest: Any, **options: Any) -> Any:
        check_dtype(query)
        return kernel(query, *rest, **options)

    return checked


_PLAIN_KERNELS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}
KERNELS = {name: _of_16_bits(kernel) for name, kernel in _PLAIN_KERNELS.items()}
"""Operators of CUDA, by name."""


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Have the operators of CUDA on a CPU, in any dtype, and the gradient of `flex_attention`.

    Torch has code for that gradient on a CPU, and refuses to use it.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _PLAIN_KERNELS.items():
        library.impl(name, kernel, "CPU")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # of its tracing
        patch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
        yield
    library._destroy()


def install_flash_attention(patch: pytest.MonkeyPatch) -> list[int]:
    """Make the package importable, and transformers find it.

    Returns:
        A list that gets the number of sequences of each call.
    """
    calls: list[int] = []

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        **_: Any,
    ) -> Tensor:
        check_dtype(q)
        calls.append(len(cu_seqlens_q) - 1)
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        parts: list[Tensor] = []
        for index in range(len(queries) - 1):
            own = [
                tensor[begin[index] : begin[index + 1]].transpose(0, 1)
                for tensor, begin in ((q, queries), (k, keys), (v, keys))
            ]
            num_queries, num_keys = own[0].shape[1], own[1].shape[1]
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            mask = mask.tril(num_keys - num_queries) if causal else mask
            out = scaled_dot_product_attention(
                *own, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    contents = {
        "flash_attn_func": attend,
        "flash_attn_varlen_func": attend,
        "flash_attn_with_kvcache": None,
    }
    vars(package).update(contents)
    vars(padding).update(pad_input=None, unpad_input=None)
    patch.setitem(sys.modules, "flash_attn", package)
    patch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    patch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True)
    patch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    patch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    patch.setattr(
        "agentrl.engines.transformers.engine.is_flash_attn_2_available", lambda: True, raising=False
    )
    return calls
