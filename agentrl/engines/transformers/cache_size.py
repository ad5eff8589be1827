"""Settings of the embedded engine, and the size of its cache by the memory that is free."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.transformers.continuous_batching import BatchLimits
from agentrl.engines.transformers.paged_attention import ATTENTION_NAME
from agentrl.errors import EngineError

CACHE_MEMORY_FRAC = 0.3
"""Largest share of the free memory for the cache when the engine is built."""
RESERVED_PAGES = 1
"""Pages that the library's allocator uses itself."""
CONTIGUOUS_SHARE = 1.5
"""Most bytes of a `DecodeCache` for each byte of the pages of the same sequences."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngineSettings:
    """Settings of the engine (`rollout.engine.transformers`); None: chosen automatically."""

    page_size: int | None = None
    """Tokens of one cache page. Small pages share more of a prefix; large ones cost less."""
    num_pages: int | None = None
    """Pages of the cache."""
    max_batch_tokens: int | None = None
    """Most tokens of one forward pass, which limits the memory of a prefill."""
    max_batch_size: int | None = None
    """Most sequences of one forward pass; further calls wait."""
    max_model_len: int | None = None
    """Most tokens of a sequence; None: the model's `max_position_embeddings`."""
    attention: str | None = None
    """An attention implementation of transformers; None: chosen by device."""
    seed: int | None = None
    """For calls without a seed of their own; None: from the operating system."""
    fit_memory: bool = True
    """Whether a cache without a configured size may shrink to the free memory. Then that memory
    changes the samples by rounding: a smaller cache shares fewer prefixes and computes more again.
    False: too little memory is an error."""
    reserved_bytes: int = 0
    """Free memory that is not for the cache, because others will allocate it later."""


def choose_limits(
    settings: TransformersEngineSettings, model: nn.Module, max_model_len: int
) -> BatchLimits:
    """Complete the settings.

    The cache has space for `max_batch_size` sequences of full length, within a share of the free
    memory.

    Raises:
        EngineError: The cache cannot hold one sequence of full length, or it does not fit into the
            free memory and must not shrink (`fit_memory`).
    """
    is_ours = model.config._attn_implementation == ATTENTION_NAME  # pyright: ignore
    page_size = settings.page_size or (32 if is_ours and model.device.type == "cpu" else 256)
    max_batch_size = settings.max_batch_size or 256
    pages_each = math.ceil(max_model_len / page_size)
    num_pages = settings.num_pages
    if num_pages is None:
        wanted = RESERVED_PAGES + max_batch_size * pages_each
        num_pages = min(wanted, _affordable_pages(model, page_size, settings.reserved_bytes))
        if num_pages < wanted and not settings.fit_memory:
            raise EngineError(
                f"the cache needs {wanted} pages for all concurrent requests, and only {num_pages} "
                "fit into the free memory: with rollout.deterministic its size must not depend on "
                "that",
                key="rollout.engine.transformers.num_pages",
                expected="a number of pages, or a smaller rollout.max_concurrent_requests",
            )
    if num_pages < RESERVED_PAGES + pages_each:
        raise _cache_too_small(settings, num_pages, page_size, max_model_len)
    return BatchLimits(
        page_size=page_size,
        num_pages=num_pages,
        max_batch_tokens=settings.max_batch_tokens or (4096 if is_ours else 1024),
        max_batch_size=max_batch_size,
    )


def _cache_too_small(
    settings: TransformersEngineSettings, num_pages: int, page_size: int, max_model_len: int
) -> EngineError:
    needed = RESERVED_PAGES + math.ceil(max_model_len / page_size)
    size = (
        f"{num_pages} pages of {page_size} tokens, and one sequence of {max_model_len} tokens "
        f"needs {needed}"
    )
    if settings.num_pages is not None:
        return EngineError(
            f"the engine's cache has {size}",
            key="rollout.engine.transformers.num_pages",
            expected=f">= {needed}, or null",
        )
    return EngineError(
        f"only a cache of this size fits into the free memory: {size}",
        key="rollout.max_model_len",
        expected="shorter sequences (data.max_prompt_length, data.max_response_length), more free "
        "memory, or rollout.engine.transformers.num_pages to take more than "
        f"{CACHE_MEMORY_FRAC:.0%} of it",
    )


def _affordable_pages(model: nn.Module, page_size: int, reserved_bytes: int) -> int:
    parameter = next(model.parameters())
    width = sum(shape.key_width for shape in AttentionShape.of_layers(model.config))
    page_bytes = 2 * width * page_size * parameter.dtype.itemsize
    if parameter.device.type == "cpu":
        page_bytes *= 1 + CONTIGUOUS_SHARE
    free_bytes = max(0, _free_bytes(parameter.device) - reserved_bytes)
    return int(free_bytes * CACHE_MEMORY_FRAC / page_bytes)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available = psutil.virtual_memory().available
    in_container = free_bytes_of_cgroup(CGROUPS)
    return available if in_container is None else min(available, in_container)


def free_bytes_of_cgroup(folder: Path) -> int | None:
    """Return what this container may still allocate; None: there is no limit.

    Files that the kernel caches are free: it drops them when memory is needed.

    Args:
        folder: The mounted control groups, of version 2 or 1.
    """
    versions = (
        (folder, "memory.max", "memory.current", "inactive_file"),
        (
            folder / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    )
    for group, limit_name, used_name, cached_name in versions:
        try:
            limit = (group / limit_name).read_text().strip()
            used = int((group / used_name).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        return max(0, int(limit) - used + int(stat.get(cached_name, 0)))
    return None
