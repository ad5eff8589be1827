"""A short supervised training on conversations, with the loss masks of a rollout."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from agentrl.config.schema.prepare import SftConfig
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.model_config import check_lengths
from agentrl.engines.vision import has_vision
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.templates import ChatTemplate
from agentrl.workers.batches import split_micro_batches
from agentrl.workers.demonstrations import Demonstration, Demonstrations, pad_demonstrations
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_hf_config, load_policy
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.optim import PolicyOptimizer
from agentrl.workers.packing import PaddedRows, count_tokens, partition_balanced
from agentrl.workers.tokenizer import check_tokenizer, load_processor, load_tokenizer

logger = logging.getLogger(__name__)

_SMALL_HIDDEN_SIZE = 256
"""Largest hidden size of a model whose batches are computed in two halves, one thread each. For the
quick start's model a step takes 8 % less time so than with two threads in each kernel."""


@dataclass(frozen=True, slots=True)
class SftStep:
    """The result of one optimizer step."""

    step: int
    """From 1."""
    loss: float
    """Weighted mean of the negative log-probability, in nats."""
    grad_norm: float
    lr: float
    num_tokens: int
    """Tokens of the batch, over all ranks."""
    seconds: float


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a supervised training."""

    num_conversations: int
    num_dropped: int
    """Conversations longer than `max_length`."""
    last: SftStep
    held_out_loss: float | None = None
    """Weighted mean over the conversations that were not trained on; None if there are none."""


def run_sft(
    config: SftConfig,
    world: World,
    *,
    tools: Sequence[OpenAIFunctionToolSchema] = (),
    model: ModelConfig | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    on_step: Callable[[SftStep], None] | None = None,
) -> SftResult:
    """Train a model on conversations and write it to `out_dir` as a Hugging Face folder.

    Args:
        config: Model, data, length, optimizer.
        world: The ranks; each takes its share of every batch.
        tools: The tools of conversations without `tools` of their own.
        model: Model settings of the run that follows; its `path` and LoRA are not read: the
            warm-up trains every weight, except those of a frozen vision tower.
        template_kwargs: The run's `data.apply_chat_template_kwargs`.
        mm_processor_kwargs: The run's `data.mm_processor_kwargs`.
        now: The date for templates that use it.
        on_step: Called after every step, on every rank.

    Raises:
        ConfigError: for a model that cannot be used.
        TemplateError: for a chat template that cannot be used.
        DataError: for a file without a usable conversation, and for a conversation that calls a
            tool that it does not have.
        CheckpointError: if the result cannot be written.
    """
    model = (model or ModelConfig(path="")).without_lora()
    model = model.model_copy(update={"path": config.model_path})
    tokenizer = load_tokenizer(model)
    processor = load_processor(model, tokenizer, kwargs=mm_processor_kwargs)
    template = ChatTemplate(
        tokenizer,
        custom_template=model.custom_chat_template,
        template_kwargs=template_kwargs,
        now=now,
        media=processor,
    )
    if model.custom_chat_template is not None:
        tokenizer.chat_template = template.structure.renderer.source  # which an export then has
    hf_config = load_hf_config(model)
    check_lengths(hf_config, config.max_length, key="model.path", lengths="max_length")
    policy = load_policy(model, world, FsdpConfig(), processor=processor)
    check_tokenizer(tokenizer, policy.config)
    dataset = Demonstrations(config, template, tools)
    optimizer = PolicyOptimizer(policy.trained_weights(), config.optim, world, config.steps)
    policy.train()
    last: SftStep | None = None
    with _open_halves(policy) as halves:
        for step, batch in enumerate(dataset.batches(), start=1):
            last = _take_step(policy, optimizer, batch, config.grad_clip, step, halves)
            if on_step is not None:
                on_step(last)
    assert last is not None
    held_out_loss = _loss_on(policy, dataset.held_out())
    export_hf(policy, tokenizer, config.out_dir)
    return SftResult(dataset.num_conversations, dataset.num_dropped, last, held_out_loss)


def _loss_on(policy: PolicyModel, demonstrations: Sequence[Demonstration]) -> float | None:
    """Compute the weighted mean loss without training; None for no demonstrations."""
    world = policy.world
    rows, weights = pad_demonstrations(demonstrations[world.rank :: world.size])
    total = world.sum([float(weights.sum())])[0]
    if not total:
        return None
    policy.eval()
    with torch.no_grad():
        every = range(len(weights))
        losses = [float(loss) for loss in _micro_batch_losses(policy, rows, weights, total, every)]
    return world.sum([sum(losses)])[0]


def _micro_batch_losses(
    policy: PolicyModel, rows: PaddedRows, weights: Tensor, total: float, index: Sequence[int]
) -> Iterator[Tensor]:
    """Compute the share that the rows `index` have in the weighted mean loss, by micro-batch."""
    world, params = policy.world, ScoringParams(temperature=1.0)
    sharing = policy.max_sharing_length(share_prefixes=params.share_prefixes)
    for packed in split_micro_batches(rows, index, None, world, max_sharing_length=sharing):
        scores = policy(packed, params)
        own = weights[list(packed.row_index)] if packed.row_index else weights[:0]
        target_weights = own[packed.rows.cpu(), packed.columns.cpu()].to(world.device)
        yield -(scores.log_probs * target_weights).sum() / total


@contextmanager
def _open_halves(policy: PolicyModel) -> Iterator[ThreadPoolExecutor | None]:
    """Start two threads for the halves of each batch if the model's kernels are small.

    Only for plain weights on a CPU with several threads, without a vision tower, which keeps
    features, and without dropout, whose draws would depend on the order of the threads. Otherwise
    None.
    """
    num_threads, world, hidden_size = (
        torch.get_num_threads(),
        policy.world,
        policy.text_config.hidden_size,
    )
    small = world.device.type == "cpu" and hidden_size <= _SMALL_HIDDEN_SIZE
    plain = world.is_alone and not isinstance(policy, FSDPModule) and not has_vision(policy.config)
    draws = not policy.max_sharing_length(share_prefixes=True)
    if num_threads == 1 or not small or not plain or draws:
        yield None
        return
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as halves:
        torch.set_num_threads(1)
        try:
            yield halves
        finally:
            torch.set_num_threads(num_threads)


def _backward_in_halves(
    policy: PolicyModel,
    rows: PaddedRows,
    weights: Tensor,
    total: float,
    halves: ThreadPoolExecutor,
) -> float:
    """Compute the gradients of two halves at the same time, add them in order; return the loss."""
    parameters = list(policy.parameters())

    def differentiate(index: list[int]) -> tuple[float, list[Tensor]]:
        loss_sum, sums = 0.0, [torch.zeros_like(one) for one in parameters]
        for loss in _micro_batch_losses(policy, rows, weights, total, index):
            grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for added, grad in zip(sums, grads, strict=True):
                added.add_(grad)
            loss_sum += float(loss.detach())
        return loss_sum, sums

    parts = list(halves.map(differentiate, partition_balanced(count_tokens(rows), 2)))
    for parameter, *grads in zip(parameters, *(sums for _, sums in parts), strict=True):
        parameter.grad = grads[0].add_(grads[1])
    return sum(loss for loss, _ in parts)


def _take_step(
    policy: PolicyModel,
    optimizer: PolicyOptimizer,
    batch: Sequence[Demonstration],
    grad_clip: float,
    step: int,
    halves: ThreadPoolExecutor | None,
) -> SftStep:
    start, world = time.perf_counter(), policy.world
    rows, weights = pad_demonstrations(batch[world.rank :: world.size])
    total = world.sum([float(weights.sum())])[0]
    if halves is None:
        loss_sum = 0.0
        for loss in _micro_batch_losses(policy, rows, weights, total, range(len(weights))):
            (loss * world.size).backward()
            loss_sum += float(loss.detach())
    else:
        loss_sum = _backward_in_halves(policy, rows, weights, total, halves)
    grad_norm, lr = optimizer.grad_norm(), optimizer.lr
    loss_sum = world.sum([loss_sum])[0]
    if np.isfinite(loss_sum) and np.isfinite(grad_norm):
        optimizer.step(grad_scale=min(1.0, grad_clip / (grad_norm + 1e-6)))
    else:
        optimizer.drop_gradients()
        logger.warning("step %d is skipped: loss %s, gradient norm %s", step, loss_sum, grad_norm)
    num_tokens = sum(len(one.ids) for one in batch)
    return SftStep(step, loss_sum, grad_norm, lr, num_tokens, time.perf_counter() - start)
