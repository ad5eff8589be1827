"""Synchronization of the trainer's weights to the engine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.engines.protocol import FollowsUpdates, LoadsTower, SyncFigures
from agentrl.progress import Advance
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import full_tensor

if TYPE_CHECKING:
    from agentrl.engines.protocol import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """The cost of one sync on this rank."""

    seconds: float
    num_bytes: int
    """Bytes written or sent; 0 if the engine computes on the policy's own tensors."""
    num_buckets: int
    num_attempts: int


def iter_full_weights(
    policy: PolicyModel, *, dtype: torch.dtype | None = None, has_tower: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the whole weights by Hugging Face name, each once; adapters are merged.

    On one rank these are the trainer's own tensors, without a copy, except those that have an
    adapter. On several ranks each is gathered on demand, so that one whole weight exists at a time.
    A collective: every rank must exhaust the iterator.

    Args:
        policy: The policy.
        dtype: The weights are converted to this dtype before they are gathered; None: unchanged.
        has_tower: Whether the receiver has the vision tower of the model's files. Then a tower that
            is not trained is left out.
    """
    without = frozenset(policy.tower.frozen_weights() if has_tower else ())
    for name, weight in policy.merged_weights(without):
        yield name, full_tensor(weight.to(dtype or weight.dtype))


async def sync_weights(
    policy: PolicyModel, engine: "Engine", *, version: int, max_attempts: int = 1
) -> SyncResult:
    """Update the engine to the policy's weights; the engine drops its caches of older weights.

    An attempt that fails on one rank has failed on all ranks, and is repeated as a whole. A
    collective: all ranks wait until every rank's engine has the weights.

    Args:
        policy: The new weights.
        engine: This rank's engine, or the one that all ranks share.
        version: The policy version of these weights.
        max_attempts: Maximum number of attempts.

    Raises:
        EngineError: if the last attempt fails; or the error that this rank's engine raised.
        RankError: if another rank's engine raised an error.
    """
    begun = time.monotonic()
    for attempt in range(1, max_attempts + 1):
        try:
            with policy.on_device(), policy.world.raise_on_all_ranks():
                figures = await _try_sync(policy, engine, version)
            if engine.is_shared:
                with policy.world.raise_on_all_ranks():
                    # Ranks that sent no weights also learn which servers have them.
                    if isinstance(engine, FollowsUpdates) and not policy.world.is_main:
                        await engine.follow_update(version=version)
        except Exception as error:
            # A retry needs all ranks, so it follows only errors that all ranks raised.
            if attempt == max_attempts or error is not policy.world.status.shared_error:
                raise
        else:
            return SyncResult(
                seconds=time.monotonic() - begun,
                num_bytes=figures.num_bytes,
                num_buckets=figures.num_buckets,
                num_attempts=attempt,
            )
    raise ValueError(f"max_attempts is {max_attempts}")


async def _try_sync(policy: PolicyModel, engine: "Engine", version: int) -> SyncFigures:
    # The engine samples in the dtype of the layers.
    has_tower = isinstance(engine, LoadsTower) and engine.loads_tower
    with policy.world.status.count(sum(1 for _ in policy.named_weights())) as advance:
        weights = _counted(
            iter_full_weights(policy, dtype=policy.compute_dtype, has_tower=has_tower), advance
        )
        try:
            if engine.is_shared and not policy.world.is_main:
                return SyncFigures()
            return await engine.update_weights(weights, version=version)
        finally:
            # Exhaust the iterator: the other ranks wait in collectives for the rest of the weights.
            for _ in weights:
                pass


def _counted(
    weights: Iterator[tuple[str, Tensor]], advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    for weight in weights:
        advance()
        yield weight
