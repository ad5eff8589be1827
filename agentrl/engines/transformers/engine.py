"""The embedded engine: transformers' continuous batching in the trainer's process."""

import asyncio
import itertools
import random
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import nn
from transformers.utils.import_utils import is_flash_attn_2_available

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
from agentrl.engines.transformers.cache_size import TransformersEngineSettings, choose_limits
from agentrl.engines.transformers.paged_attention import (
    ATTENTION_NAME,
    register_paged_attention,
)
from agentrl.engines.transformers.requests import Call
from agentrl.engines.transformers.shared_weights import SharedWeights
from agentrl.engines.vision import has_vision
from agentrl.errors import EngineError
from agentrl.media.records import MediaSpan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class TransformersEngine:
    """Generates in this process, on the trainer's own weights if possible.

    The engine has its own module. If the trainer's parameters are whole on this rank and have the
    compute type, the module's parameters are the trainer's tensors: there is no second copy, and an
    optimizer step has effect at once. Otherwise (float32 master weights computed in bfloat16,
    shards on several ranks) the engine has a copy in the compute type, which `update_weights`
    fills. The trainer's module never changes. Sampling runs on its own thread, which starts with
    the first call. After a change of the weights, `update_weights` must be called, so that no
    prefix of the old weights is used.

    Images and videos need our paged attention. The vision tower runs once for each, until the next
    update of the weights.

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
        device: torch.device | None = None,
        settings: TransformersEngineSettings | None = None,
    ) -> Self:
        """Make an engine on the weights of a Hugging Face model, sharded by FSDP2 or not.

        Args:
            model: The trainer's module. Its parameters are shared if they are whole on this rank,
                on `device` and of type `dtype`. Otherwise the engine has its own memory, which
                `update_weights` fills; if parameters are shards, that must happen before the first
                call.
            tokenizer: Needed for stop strings only.
            dtype: The compute type; None: the parameters' type.
            device: Where the engine computes; None: where the parameters are. Parameters that are
                offloaded to host memory need it.
            settings: Sizes and limits.

        Raises:
            EngineError: The module cannot generate, or the cache cannot hold one sequence of full
                length.
        """
        attention = choose_attention(
            model, settings or TransformersEngineSettings(), dtype=dtype, device=device
        )
        weights = SharedWeights.of(model, attention=attention, dtype=dtype, device=device)
        return cls(weights, tokenizer=tokenizer, settings=settings)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`). Cancelling removes the call.

        Raises:
            EngineError: The input leaves no capacity for a token or is not of this vocabulary, stop
                strings were given without a tokenizer, or the engine has failed or was closed.
        """
        call = self._new_call(
            EngineCall(input_ids=input_ids, sampling=sampling, request_id=request_id, media=media)
        )
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
                made.append(self._new_call(call))
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

    def _new_call(self, given: EngineCall) -> Call:
        input_ids, sampling = list(given.input_ids), given.sampling
        max_tokens = self.max_model_len - len(input_ids)
        problem = self._problem(input_ids, sampling, max_tokens)
        if problem is None and given.media:
            problem = self._media_problem(given.media, len(input_ids))
        if problem is not None:
            raise EngineError(problem, request_id=given.request_id)
        return Call(
            key=f"{given.request_id}#{next(self._counter)}",
            request_id=given.request_id,
            input_ids=input_ids,
            sampling=sampling,
            max_tokens=min(sampling.max_new_tokens, max_tokens),
            stop=StopCheck.of(sampling, self._decode),
            random=self._random if sampling.seed is None else random.Random(sampling.seed),
            future=asyncio.get_running_loop().create_future(),
            version=self._version,
            media=tuple(given.media),
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

    def _media_problem(self, media: Sequence[MediaSpan], num_tokens: int) -> str | None:
        """Return why the engine cannot take the media of a call, or None."""
        config = self._weights.module.config
        if not has_vision(config):
            return "the model reads no pictures: it has no vision tower"
        attention = config.get_text_config()._attn_implementation
        if attention != ATTENTION_NAME:
            return (
                f"the engine reads pictures only with its own attention, not with {attention!r}: "
                "set rollout.engine.transformers.attention=null; a model with sliding windows "
                "needs rollout.engine.name=sglang"
            )
        ends = [0, *(span.end for span in media)]
        for end, span in zip(ends, media, strict=False):
            length = span.end - span.start
            if not end <= span.start < span.end <= num_tokens:
                return f"the runs of placeholders are not in order within {num_tokens} tokens"
            if length != span.item.run_length or span.offset + length > span.item.num_tokens:
                return (
                    f"the placeholder tokens [{span.start}, {span.end}) are not a whole run of "
                    f"their {span.item.kind}, which has runs of {span.item.run_length}"
                )
        return None


def choose_attention(
    model: nn.Module,
    settings: TransformersEngineSettings,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> str:
    """Return FlashAttention for 16-bit types on a CUDA device that has it, else ours.

    Our attention reads whole pages of full-attention layers. A model with sliding windows gets the
    library's `sdpa`. A vision-language model gets ours where it can, because only ours reads
    pictures.
    """
    if settings.attention is not None:
        return settings.attention
    parameter = next(model.parameters())
    dtype, device = dtype or parameter.dtype, device or parameter.device
    whole_config: PretrainedConfig = model.config  # pyright: ignore[reportAssignmentType]
    is_16_bit_on_cuda = device.type == "cuda" and dtype.itemsize == 2
    if is_16_bit_on_cuda and not has_vision(whole_config) and _has_flash_attention():
        return "flash_attention_2"
    config = whole_config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        attends_fully = getattr(config, "sliding_window", None) is None
    else:
        attends_fully = set(layer_types) == {"full_attention"}
    return register_paged_attention() if attends_fully else "sdpa"


def _has_flash_attention() -> bool:
    """Import FlashAttention: a package that was built for another torch is found, and fails."""
    try:
        import flash_attn  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return is_flash_attn_2_available()


def _cannot_decode(_: Sequence[int]) -> str:
    raise EngineError("stop strings need the engine's tokenizer")
