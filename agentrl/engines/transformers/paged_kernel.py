"""Attention that reads the cache's pages in place, on CUDA devices.

`torch.nn.attention.varlen` takes a table of pages since torch 2.12. Which arguments and page sizes
work depends on the release and on the device, so a kernel is tried on random numbers before it is
used. Without one, keys and values of all sequences are copied in every layer of every step.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.transformers import paged_attention

logger = logging.getLogger(__name__)

Attend = Callable[..., Any]
"""Has the signature of `torch.nn.attention.varlen.varlen_attn`."""
PAGE_SIZE = 256
"""Tokens of a page: FlashAttention 2 takes only multiples."""


@dataclass(frozen=True, slots=True)
class PageReader:
    """The arguments of the kernel's calls in one step."""

    attend: Attend
    query_ends: torch.Tensor
    """[S + 1] int32: 0, then where each sequence's queries end."""
    key_ends: torch.Tensor | None
    """[S + 1] int32: 0, then the cumulated lengths; None: the kernel does not take them."""
    lengths: torch.Tensor
    """[S] int32: tokens of each sequence, with those of this step."""
    pages: torch.Tensor
    """[S, P] int32: page rows of each sequence, padded with 0."""
    longest: tuple[int, int]
    """Most queries and most keys of a sequence."""
    page_size: int

    def read(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        key_heads: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attend, each sequence to its own pages: [T, heads, D] -> [T, heads, D]."""
        shape = (-1, self.page_size, key_heads, query.shape[2])
        return self.attend(
            query.contiguous(), key_pages.view(shape), value_pages.view(shape),
            self.query_ends, self.key_ends, *self.longest, scale=scaling, window_size=(-1, 0),
            enable_gqa=query.shape[1] != key_heads, seqused_k=self.lengths, block_table=self.pages,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """A kernel that was found to work."""

    attend: Attend
    takes_key_ends: bool

    def plan(
        self,
        past: NDArray[np.int64],
        counts: NDArray[np.int64],
        table: NDArray[np.int64],
        page_size: int,
        device: torch.device,
    ) -> PageReader:
        """Return the arguments for sequences of `past` cached and `counts` new tokens."""
        totals = past + counts

        def move(array: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        return PageReader(
            attend=self.attend,
            query_ends=move(np.concatenate([[0], counts.cumsum()])),
            key_ends=move(np.concatenate([[0], totals.cumsum()])) if self.takes_key_ends else None,
            lengths=move(totals),
            pages=move(table),
            longest=(int(counts.max()), int(totals.max())),
            page_size=page_size,
        )


def find_paged_kernel(
    model: Any, page_size: int, *, attend: Attend | None = None
) -> PagedKernel | None:
    """Return a kernel that reads pages in place and agrees with the copying path, or None.

    Args:
        model: The engine's `PreTrainedModel`.
        page_size: Tokens of a page.
        attend: The kernel; None: torch's, if it has one.
    """
    failure = "torch.nn.attention.varlen is missing"
    try:
        from torch.nn.attention.varlen import varlen_attn

        attend = attend or varlen_attn
    except ImportError:
        pass
    if attend is not None:
        for takes_key_ends in (False, True):
            kernel = PagedKernel(attend, takes_key_ends)
            try:
                distance = _distance(kernel, model, page_size)
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:
                failure = " ".join(str(error).split())[:200]
                continue
            if distance < (1e-4 if model.dtype == torch.float32 else 5e-2):
                return kernel
            failure = f"it differs by {distance:.1e}"
    logger.warning(
        "the engine copies the keys and values of all sequences in every layer of every step, "
        "which is slow and takes memory: no kernel reads pages of %d tokens in %s (%s). Use "
        "SGLang, flash-attn, or torch >= 2.12 with model.dtype=bfloat16",
        page_size, model.dtype, failure,
    )  # fmt: skip
    return None


@torch.inference_mode()
def _distance(kernel: PagedKernel, model: Any, page_size: int) -> float:
    """Return the largest difference from the copying path, over random numbers."""
    device = model.device
    heads, key_heads, head_dim = AttentionShape.widest(model.config)
    shapes = ((0, 5), (3, 1), (page_size + 2, 4), (2 * page_size - 1, 1))
    num_tokens = sum(count for _, count in shapes)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    free = iter((3, 8, 1, 7, 5, 2, 11, 4, 0, 9, 6, 10))
    spans = [
        paged_attention.Span(
            past, count, [next(free) for _ in range(-(-(past + count) // page_size))]
        )
        for past, count in shapes
    ]
    stores = [draw(12 * page_size, key_heads * head_dim) for _ in range(2)]
    layer = paged_attention.LayerPages(*stores, *(store.view(12, -1) for store in stores))
    geometry = paged_attention.PageGeometry(page_size, 1, lambda _: layer)
    query, key, value = (
        draw(1, number, num_tokens, head_dim) for number in (heads, key_heads, key_heads)
    )

    def attend(own: PagedKernel | None) -> torch.Tensor:
        batch = paged_attention.plan_batch(spans, geometry, device=device, kernel=own)
        module: Any = SimpleNamespace(layer_idx=0)
        return paged_attention.paged_attention_forward(
            module, query, key, value, None, paged_batch=batch
        )[0]

    return (attend(kernel) - attend(None)).abs().max().item()
