"""Transformers' continuous batching, with three parts replaced.

The library's scheduler decides which sequences run. Its cache holds their keys and values in pages,
shares prefixes and frees pages when it is full. The replaced parts:

- `TrackedState`: the engine decides when a request ends (stop strings, budgets);
- `RowSampler`: temperature, top-k and top-p for each row, and log-probabilities over the whole
  vocabulary, which the library's own sampling does not return;
- `PagedInputs`: a packed batch without masks over the whole cache (see `paged_attention.py`), with
  the features of pictures (see `vision_inputs.py`).

With another attention than ours, the library's own inputs are used. Only this module,
`requests.py` and `CacheAccess` depend on the library's internals.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState

from agentrl.engines.transformers.decode_cache import DecodeCache
from agentrl.engines.transformers.paged_attention import (
    ATTENTION_NAME,
    CacheAccess,
    Span,
    plan_batch,
)
from agentrl.engines.transformers.paged_kernel import PagedKernel, find_paged_kernel
from agentrl.engines.transformers.requests import Call, CallRouter, CallSink, TrackedState
from agentrl.engines.transformers.sampling import Sampled, SamplingRows, sample_tokens
from agentrl.engines.transformers.vision_inputs import Scheduled, VisionInputs
from agentrl.engines.vision import PlacedFeatures, compute_logits, has_vision

_KERNELS: WeakKeyDictionary[PreTrainedModel, PagedKernel | None] = WeakKeyDictionary()
"""The kernel of each model; a batcher is built again at each wake."""
NOTHING_SAMPLED = Sampled(torch.empty(0, dtype=torch.int64), torch.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes of the cache and of one forward pass."""

    page_size: int
    """Tokens of one cache page."""
    num_pages: int
    """Pages of the cache, each for all layers."""
    max_batch_tokens: int
    """Tokens of one forward pass."""
    max_batch_size: int
    """Sequences of one forward pass."""


class RowSampler:
    """Samples in place of the library's logits processors; gets each batch before it runs."""

    tensors_required = 0
    do_processing = False

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = 0
        self._rows = SamplingRows.of([], vocab_size=vocab_size, device=device)

    def fill_defaults(self, _: torch.Tensor) -> None:
        """Do nothing: the library's static tensors are not used."""

    def check_kwargs(self, _: dict[str, Any]) -> None:
        """Do nothing: each call has its own parameters."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Prepare the parameters of the rows that get a token in the next step."""
        draws = []
        for future in requests_in_batch:
            call = _call_of(future)
            if call.cached_tokens is None:
                call.cached_tokens = future.state.position_offset - future.query_length
            if future.has_new_token:
                draws.append(call.draw())
        self._num_rows = len(draws)
        self._rows = SamplingRows.of(draws, vocab_size=self._vocab_size, device=self._device)
        return arg_storage

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Sample for the rows that were prepared last.

        Args:
            logits: [at least R, V]; the library pads after the rows that get a token.
        """
        if not self._num_rows:
            return NOTHING_SAMPLED
        return sample_tokens(logits[: self._num_rows], self._rows)


class SamplingRunner(ModelRunner):
    """The library's forward pass, followed by our sampling."""

    logit_processor: Any
    """The `RowSampler`."""

    def _forward_process_and_sample(
        self,
        model: nn.Module,
        batch_data: dict[str, Any],
        carry_over_ids: torch.Tensor,
        prev_output_ids: torch.Tensor,
        output_ids: torch.Tensor,
    ) -> None:
        logits = model(**batch_data).logits[0]
        if "logits_to_keep" not in batch_data:
            logits = logits[batch_data["logits_indices"]]
        sampled = self.logit_processor.sample(logits)
        count = sampled.token_ids.shape[0]
        output_ids[0, :count].copy_(sampled.token_ids)
        output_ids[1, :count].copy_(sampled.log_probs.view(torch.int32))


class PagedInputs:
    """Packs a batch, runs it, and keeps what was sampled: the library's inputs and runner."""

    compute_stream = None
    use_block_table = False
    pad_inputs = False

    def __init__(
        self,
        cache: CacheAccess,
        sampler: RowSampler,
        device: torch.device,
        kernel: PagedKernel | None = None,
        vision: VisionInputs | None = None,
    ) -> None:
        self._kernel = kernel
        self._vision = vision
        self._placed: PlacedFeatures | None = None
        self.decode_cache = DecodeCache()
        self._cache = cache
        self._sampler = sampler
        self._device = device
        self._requests: list[FutureRequestState] = []
        self._model_kwargs: dict[str, Any] = {}
        self._sampled = NOTHING_SAMPLED

    def maybe_pad_inputs(
        self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool
    ) -> tuple[int, int]:
        """Return the sizes unchanged: no static shape is needed."""
        return num_q_tokens, max_kv_read

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: RowSampler,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Pack the scheduled sequences, one after the other."""
        tables = self._cache.page_tables
        spans: list[Span] = []
        scheduled: list[Scheduled] = []
        input_ids: list[int] = []
        last_rows: list[int] = []
        for future in requests_in_batch:
            state: Any = future.state
            count = future.query_length
            key: str = state.request_id
            spans.append(Span(state.position_offset, count, tables[key], key))
            scheduled.append(
                Scheduled(state.call.media, state.position_offset, len(input_ids), count)
            )
            state.position_offset += count
            input_ids += state.tokens_to_process
            if future.has_new_token:
                last_rows.append(len(input_ids) - 1)
        batch = plan_batch(
            spans,
            self._cache.geometry,
            device=self._device,
            decode_cache=self.decode_cache if self._device.type == "cpu" else None,
            kernel=self._kernel,
        )
        position_ids = batch.positions.unsqueeze(0)
        if self._vision is not None:
            input_ids = self._vision.prefix_ids.plain(input_ids)
            position_ids = self._vision.place_positions(scheduled, batch.positions)
            self._placed = self._vision.place_features(scheduled)
        self._requests = requests_in_batch
        self._model_kwargs = {
            "input_ids": torch.tensor([input_ids], device=self._device),
            "position_ids": position_ids,
            "paged_batch": batch,
            "use_cache": False,
            "logits_to_keep": torch.tensor(last_rows, dtype=torch.int64, device=self._device),
        }
        logits_processors.prepare_tensor_args(requests_in_batch, torch.empty(0))

    def get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        """Return the forward pass's arguments."""
        return self._model_kwargs

    def compute_batch(self, model: PreTrainedModel, batch_data: dict[str, Any]) -> None:
        """Run the model and sample."""
        if self._placed is None:
            logits = model(**batch_data).logits
        else:
            logits = compute_logits(model, placed=self._placed, **batch_data)
        self._sampled = self._sampler.sample(logits[0])

    def retrieve_device_outputs(self) -> None:
        """Do nothing: the results are read when they are used."""

    def prepare_batch_update(
        self,
    ) -> tuple[list[FutureRequestState], list[int], list[float]]:
        """Return the batch, with a token and a log-probability for each row that has one."""
        return self._requests, self._sampled.token_ids.tolist(), self._sampled.log_probs.tolist()

    def reset(self) -> None:
        """Forget the last batch."""
        self._requests, self._model_kwargs, self._sampled = [], {}, NOTHING_SAMPLED
        self._placed = None


class _Manager(ContinuousBatchingManager):
    """The library's manager, used to build a batch processor; its thread is never started."""

    def switch_to_cb_friendly_attn(self, model: Any, *settings: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep our attention, which the library's check does not know."""
        if model.config._attn_implementation != ATTENTION_NAME:
            super().switch_to_cb_friendly_attn(model, *settings)

    def build(self, sampler: RowSampler, sink: CallSink) -> ContinuousBatchProcessor:
        """Make a processor that samples with `sampler` and passes its results to `sink`."""
        self.logit_processor: Any = sampler
        self.output_router = CallRouter(sink)
        # The library would seed torch for the whole process here, and so for the trainer.
        helper: Any = self.distributed_helper
        helper.set_tp_seed = lambda *_: None
        return self._create_batch_processor()


@dataclass(frozen=True, slots=True)
class Batcher:
    """Runs calls together, step by step, on the caller's thread."""

    model: Any
    """The engine's `PreTrainedModel`."""
    processor: Any
    """`ContinuousBatchProcessor`, parts of which were replaced."""
    cache: CacheAccess
    vision: VisionInputs | None = None
    """Of a vision-language model with our attention."""

    @classmethod
    def build(cls, model: Any, limits: BatchLimits, sink: CallSink) -> "Batcher":
        """Allocate the cache, and make the processor."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        vocab_size = model.config.get_text_config().vocab_size
        sampler = RowSampler(vocab_size=vocab_size, device=model.device)
        is_ours = model.config._attn_implementation == ATTENTION_NAME
        config = _library_config(limits, has_masks=not is_ours)
        manager = _Manager(model, GenerationConfig(do_sample=True), config)
        processor: Any = manager.build(sampler, sink)
        cache = CacheAccess(processor.cache, limits.page_size)
        if not cache.is_zeroed:
            cache.erase()
        vision = VisionInputs(model) if is_ours and has_vision(model.config) else None
        if is_ours:
            if model.device.type == "cuda" and model not in _KERNELS:
                _KERNELS[model] = find_paged_kernel(model, limits.page_size)
            inputs = PagedInputs(cache, sampler, model.device, _KERNELS.get(model), vision)
            processor.inputs_and_outputs = processor.model_runner = inputs
        else:
            processor.model_runner = SamplingRunner(
                logit_processor=manager.logit_processor,
                cb_config=processor.cb_config,
                cache=processor.cache,
                inputs_and_outputs=processor.inputs_and_outputs,
                do_sample=True,
                return_logprobs=True,
            )
        return cls(model, processor, cache, vision)

    def add(self, call: Call) -> None:
        """Queue a call."""
        if self.vision is not None and call.media:
            call.prefix_ids = self.vision.prefix_ids.replace(call.input_ids, call.media)
        self.processor.scheduler.add_waiting_request(TrackedState.of(call))

    def drop(self, call: Call) -> None:
        """Remove a call and free its pages; it keeps its tokens."""
        self.processor.scheduler.set_request_cancellation(call.key)
        self.processor.scheduler.clear_cancelled_requests()
        # A full cache blocks new calls until one ends. This call has ended, maybe as the last.
        self.processor.scheduler.block_new_requests = False

    def step(self) -> bool:
        """Sample the next token of every running sequence; return False if there is none."""
        if not self.processor.prepare_next_batch():
            return False
        self.processor._generation_step(self.model)
        self.processor.update_batch()
        return True

    def erase(self) -> None:
        """Set the cache's memory to zero, because masked NaN would spread."""
        self.cache.erase()
        self.free_decode_cache()

    def free_decode_cache(self) -> None:
        """Free the copies for sequences that decode; those that run get new ones."""
        if isinstance(inputs := self.processor.inputs_and_outputs, PagedInputs):
            inputs.decode_cache.clear()

    def forget_prefixes(self, running: Sequence[Call]) -> None:
        """Drop the whole cache. Running calls are queued again after their tokens.

        Their keys and values may belong to old weights, so they are computed again, and so may the
        features of pictures.
        """
        for call in running:
            self.drop(call)
        self.cache.clear()
        if self.vision is not None:
            self.vision.clear()
        for call in running:
            self.add(call)


def _call_of(future: FutureRequestState) -> Call:
    state: Any = future.state
    return state.call


def _library_config(limits: BatchLimits, *, has_masks: bool) -> ContinuousBatchingConfig:
    settings: dict[str, Any] = {
        "num_blocks": limits.num_pages,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_requests_per_batch": limits.max_batch_size,
        # The library's memory check counts masks that our attention does not have.
        "max_memory_percent": None if has_masks else 1e6,
        "return_logprobs": True,
        # Tokens must be read, and weights changed, between any two steps.
        "use_async_batching": False,
        # Sampling skips steps that no row of the batch needs.
        "use_cuda_graph": False,
    }
    known = ContinuousBatchingConfig.__dataclass_fields__
    if "auto_switch_to_flash" in known:
        # It would replace `sdpa` by a kernel that it downloads.
        settings["auto_switch_to_flash"] = False
    settings["page_size" if "page_size" in known else "block_size"] = limits.page_size
    return ContinuousBatchingConfig(**settings)
