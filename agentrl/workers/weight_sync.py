"""New weights -> the engine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.engines.protocol import FollowsUpdates, SyncFigures
from agentrl.workers.model import PolicyModel, full_tensor

if TYPE_CHECKING:
    from agentrl.engines.protocol import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What one sync cost this rank."""

    seconds: float
    num_bytes: int
    """Written or sent; 0 where the engine computes on the policy's own tensors."""
    num_buckets: int
    num_attempts: int


def iter_full_weights(
    policy: PolicyModel, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Give each weight whole, once, under its Hugging Face name.

    On one rank these are the trainer's own tensors and nothing is copied; on several each is
    gathered as it is asked for, so that one whole weight exists at a time. A collective: every
    rank must exhaust it.

    Args:
        policy: Whose weights.
        dtype: What they are given in, converted before they are gathered; None: as they are.
    """
    for name, weight in policy.named_weights():
        yield name, full_tensor(weight.detach().to(dtype or weight.dtype))


async def sync_weights(
    policy: PolicyModel, engine: "Engine", *, version: int, max_attempts: int = 1
) -> SyncResult:
    """Bring the engine to the policy's weights; its caches of older ones are dropped.

    An attempt that fails on one rank has failed on all, and is made again whole. A collective:
    nobody goes on before every rank's engine has the weights.

    Args:
        policy: The new weights.
        engine: This rank's engine, or the one of all ranks.
        version: The policy version that these weights are.
        max_attempts: How often it is tried.

    Raises:
        EngineError: where the last attempt fails; or whatever else this rank's engine raised.
        RankError: where that of another rank did.
    """
    begun = time.monotonic()
    for attempt in range(1, max_attempts + 1):
        try:
            with policy.world.raise_on_all_ranks():
                figures = await _try_sync(policy, engine, version)
            if engine.is_shared:
                with policy.world.raise_on_all_ranks():
                    await _follow(policy, engine, version)
        except Exception as error:
            # Only what all ranks know of is met by all of them with another attempt.
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
    # What the layers compute in is what the engine is to sample with, and all that need be sent.
    weights = iter_full_weights(policy, dtype=policy.compute_dtype)
    try:
        if engine.is_shared and not policy.world.is_main:
            return SyncFigures()
        return await engine.update_weights(weights, version=version)
    finally:
        # The others wait in the gathering of what this engine did not read.
        for _ in weights:
            pass


async def _follow(policy: PolicyModel, engine: "Engine", version: int) -> None:
    """Have an engine that did not send hear who has the weights."""
    if isinstance(engine, FollowsUpdates) and not policy.world.is_main:
        await engine.follow_update(version=version)
