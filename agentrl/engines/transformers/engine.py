"""The embedded engine: transformers' continuous batching in the trainer's process."""

import asyncio
import importlib.util
import itertools
import math
import random
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    EngineCall,
    MemoryTag,
    SamplingParams,
    SyncFigures,
)
from agentrl.engines.stopping import StopCheck, decoder_of
from agentrl.engines.transformers.batch_worker import BatchWorker
from agentrl.engines.transformers.continuous_batching import BatchLimits
from agentrl.engines.transformers.paged_attention import ATTENTION_NAME, register_paged_attention
from agentrl.engines.transformers.requests import Call
from agentrl.engines.transformers.shared_weights import SharedWeights
from agentrl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_MEMORY_FRAC = 0.3
"""Largest share of the free memory for the cache when the engine is built."""
RESERVED_PAGES = 1
"""Pages that the library's allocator uses itself."""


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


class TransformersEngine:
    """Generates in this process, on the trainer's own weights if possible.

    The engine has its own module. If the trainer's parameters are whole on this rank and have the
    compute type, the module's parameters are the trainer's tensors: there is no second copy, and an
    optimizer step has effect at once. Otherwise (float32 master weights computed in bfloat16,
    shards on several ranks) the engine has a copy in the compute type, which `update_weights`
    fills. The trainer's module never changes. Sampling runs on its own thread, which starts with
    the first call. After a change of the weights, `update_weights` must be called, so that no
    prefix of the old weights is used.

    A completion ends only at the stops of its `SamplingParams`. The model's own end-of-text tokens
    are not added.

    Example:
        >>> engine = TransformersEngine.from_model(model, tokenizer=tokenizer)
        >>> sampling = SamplingParams(max_new_tokens=8)
        >>> completion = await engine.generate(ids, sampling, request_id="0")
    """

    max_model_len: int
    is_shared = False

    def __init__(
        self,
        weights: SharedWeights,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        settings: TransformersEngineSettings | None = None,
    ) -> None:
        """Prefer `from_model`.

        Args:
            weights: The engine's module.
            tokenizer: Needed for stop strings only.
            settings: Sizes and limits.

        Raises:
            EngineError: The cache cannot hold one sequence of full length.
        """
        settings = settings or TransformersEngineSettings()
        config = weights.module.config.get_text_config()
        device = weights.module.device
        self.max_model_len = (
            settings.max_model_len or getattr(config, "max_position_embeddings", None) or 4096
        )
        limits = choose_limits(settings, weights.module, self.max_model_len)
        self._vocab_size: int = config.vocab_size
        self._device = device
        self._weights = weights
        self._decode = decoder_of(tokenizer) if tokenizer is not None else _cannot_decode
        self._random = random.Random(settings.seed)
        self._counter = itertools.count()
        self._version = 0
        self._is_asleep = False
        self._worker = BatchWorker(weights.module, limits)
        self._finalizer = weakref.finalize(self, self._worker.stop)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        dtype: torch.dtype | None = None,
        settings: TransformersEngineSettings | None = None,
    ) -> Self:
        """Make an engine on the weights of a Hugging Face model, sharded by FSDP2 or not.

        Args:
            model: The trainer's module. Its parameters are shared if they are whole on this rank
                and of type `dtype`. Otherwise the engine has its own memory, which `update_weights`
                fills; if parameters are shards, that must happen before the first call.
            tokenizer: Needed for stop strings only.
            dtype: The compute type; None: the parameters' type.
            settings: Sizes and limits.

        Raises:
            EngineError: The module cannot generate, or the cache cannot hold one sequence of full
                length.
        """
        attention = choose_attention(model, settings or TransformersEngineSettings())
        weights = SharedWeights.of(model, attention=attention, dtype=dtype)
        return cls(weights, tokenizer=tokenizer, settings=settings)

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`). Cancelling removes the call.

        Raises:
            EngineError: The input leaves no capacity for a token or is not of this vocabulary, stop
                strings were given without a tokenizer, or the engine has failed or was closed.
        """
        call = self._new_call(list(input_ids), sampling, request_id)
        self._worker.submit([call])
        try:
            return await call.future
        except asyncio.CancelledError:
            self._worker.abort(lambda other: other is call)
            raise

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that start in the same step (see `Engine.generate_together`).

        Raises:
            EngineError: The engine has failed or was closed.
        """
        made: list[Call | EngineError] = []
        for call in calls:
            try:
                made.append(self._new_call(list(call.input_ids), call.sampling, call.request_id))
            except EngineError as error:
                made.append(error)
        running = [call for call in made if isinstance(call, Call)]
        self._worker.submit(running)
        try:
            ended = iter(
                await asyncio.gather(*(call.future for call in running), return_exceptions=True)
            )
        except asyncio.CancelledError:
            self._worker.abort(lambda other: other in running)
            raise
        return [next(ended) if isinstance(call, Call) else call for call in made]

    async def abort(self, request_id: str) -> None:
        """End the running calls of a request; each returns what it has sampled."""
        self._worker.abort(lambda call: call.request_id == request_id)

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> SyncFigures:
        """Replace the weights; running calls continue with them.

        A tensor that the engine shares with the trainer is not copied. Cached prefixes are dropped,
        and running calls compute their prefixes again.

        Raises:
            EngineError: Names are unknown or missing. The engine takes no call until a complete
                update.
        """
        with self._worker.paused():
            try:
                num_bytes = self._weights.update(named_tensors)
            except BaseException as error:
                self._worker.give_up(EngineError(f"the engine's weights are incomplete: {error}"))
                raise
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._version = version
            self._worker.note_version(version)
            self._worker.forget_prefixes()
        return SyncFigures(num_bytes=num_bytes)

    async def flush_cache(self) -> None:
        """Drop every cached prefix."""
        with self._worker.paused():
            self._worker.forget_prefixes()

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Free the cache's memory. Running calls wait for `wake` and compute it again.

        The weights stay: they are the trainer's own, or the copy that the next update fills.
        """
        if MemoryTag.KV_CACHE in tags and not self._is_asleep:
            self._worker.pause()
            self._is_asleep = True
            self._worker.release_cache()

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Continue after `sleep`."""
        if MemoryTag.KV_CACHE in tags and self._is_asleep:
            self._is_asleep = False
            self._worker.resume()

    async def close(self) -> None:
        """Stop the engine's thread; running calls end with `EngineError`."""
        self._worker.stop()

    def _new_call(self, input_ids: list[int], sampling: SamplingParams, request_id: str) -> Call:
        max_tokens = self.max_model_len - len(input_ids)
        problem = self._problem(input_ids, sampling, max_tokens)
        if problem is not None:
            raise EngineError(problem, request_id=request_id)
        return Call(
            key=f"{request_id}#{next(self._counter)}",
            request_id=request_id,
            input_ids=input_ids,
            sampling=sampling,
            max_tokens=min(sampling.max_new_tokens, max_tokens),
            stop=StopCheck.of(sampling, self._decode),
            random=self._random if sampling.seed is None else random.Random(sampling.seed),
            future=asyncio.get_running_loop().create_future(),
            version=self._version,
        )

    def _problem(
        self, input_ids: list[int], sampling: SamplingParams, max_tokens: int
    ) -> str | None:
        """Return why the engine cannot take a call, or None."""
        if not self._weights.is_complete:
            return "the engine has no complete weights: call update_weights"
        if not input_ids:
            return "the input is empty"
        if max_tokens < 1:
            return (
                f"the input has {len(input_ids)} tokens, the engine's limit is {self.max_model_len}"
            )
        if min(input_ids) < 0 or max(input_ids) >= self._vocab_size:
            return f"the input has ids outside the vocabulary of {self._vocab_size}"
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens is {sampling.max_new_tokens}"
        if sampling.stop and self._decode is _cannot_decode:
            return "stop strings need the engine's tokenizer"
        return None


def choose_attention(model: nn.Module, settings: TransformersEngineSettings) -> str:
    """Return FlashAttention on a CUDA device that has it, else our paged attention.

    Our attention reads whole pages of full-attention layers. A model with sliding windows gets the
    library's `sdpa`.
    """
    if settings.attention is not None:
        return settings.attention
    device = next(model.parameters()).device
    if device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        attends_fully = getattr(config, "sliding_window", None) is None
    else:
        attends_fully = set(layer_types) == {"full_attention"}
    return register_paged_attention() if attends_fully else "sdpa"


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
    page_size = settings.page_size or (32 if is_ours else 256)
    max_batch_size = settings.max_batch_size or 256
    pages_each = math.ceil(max_model_len / page_size)
    num_pages = settings.num_pages
    if num_pages is None:
        wanted = RESERVED_PAGES + max_batch_size * pages_each
        num_pages = min(wanted, _affordable_pages(model, page_size))
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


def _affordable_pages(model: nn.Module, page_size: int) -> int:
    parameter = next(model.parameters())
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page_bytes = (
        2 * config.num_hidden_layers * heads * head_dim * page_size * parameter.dtype.itemsize
    )
    return int(_free_bytes(parameter.device) * CACHE_MEMORY_FRAC) // page_bytes


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def _cannot_decode(_: Sequence[int]) -> str:
    raise EngineError("stop strings need the engine's tokenizer")
