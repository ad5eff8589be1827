"""Check that the engine sleeps and wakes, and that it follows changed weights."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

import torch

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.engine import AS_BEFORE, AS_LOADED, CHANGED, bounded, prompts_of, sample
from agentrl.doctor.log_probs import (
    TOLERANCES,
    Difference,
    Sample,
    compare,
    judge,
    skip_scripted,
)
from agentrl.doctor.report import Checked
from agentrl.engines import Engine
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.engine_sync import EngineSync
from agentrl.workers.memory import give_back_cached
from agentrl.workers.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Synced:
    """What an engine sampled after a weight sync."""

    samples: tuple[Sample, ...]
    versions: frozenset[int | None]
    """Policy versions that the engine reported."""
    seconds: float
    """Seconds of the sync alone."""


def check_sleep(
    config: RunConfig,
    policy: PolicyModel,
    engine: Engine,
    requests: Sequence[AsyncRolloutRequest],
    loop: asyncio.Runner,
) -> Checked[EngineSync]:
    """Let the engine sleep, wake with the policy's weights, sample, and sleep again.

    It stays asleep, as it does while a run scores and trains.

    Raises:
        SkipCheckError: if no request has a prompt to sample from.
        EngineError: if an operation fails.
    """
    # One attempt, whatever the run allows: a sync that fails sometimes must fail here.
    sync = replace(EngineSync.of(config, engine, policy), max_attempts=1)
    if not sync.gives_memory:
        return Checked(sync, "engine and trainer share no accelerator")
    before, started = _free_bytes(policy.world.device), monotonic()
    loop.run(bounded(sync.sleep(), "freeing memory"))
    freed, slept = _free_bytes(policy.world.device) - before, monotonic()
    loop.run(bounded(sync.sync(AS_LOADED), "waking"))
    woken = monotonic()
    loop.run(bounded(sample(config, engine, prompts_of(requests), AS_LOADED), "sampling"))
    loop.run(bounded(sync.sleep(), "freeing memory again"))
    found = f"freed {freed / 1e9:.1f} GB in {slept - started:.1f} s, woke with the weights in "
    found += f"{woken - slept:.1f} s; answers"
    doubt = "the engine freed no memory: the update has no more than while the engine is awake"
    return Checked(sync, found, (doubt,) if freed <= 0 else ())


def check_sync(
    config: RunConfig,
    sync: EngineSync,
    requests: Sequence[AsyncRolloutRequest],
    loop: asyncio.Runner,
) -> Checked[Difference]:
    """Change every weight, sync the engine, and check that it samples by the new weights.

    The policy is restored when this returns or raises. `check_restored` restores the engine.

    Raises:
        SkipCheckError: for an engine without weights.
        EngineError: if the sync fails.
    """
    skip_scripted(config)
    policy, prompts = sync.policy, prompts_of(requests)
    with negated_weights(policy):
        synced = loop.run(_sync(config, sync, prompts, CHANGED))
        followed = compare(config, policy, synced.samples)
    stayed = compare(config, policy, synced.samples)
    checked = _with_sync(judge(config, policy, followed), synced, CHANGED)
    found = f"{checked.found}; with the old weights: mean {stayed.mean:.1e}"
    tolerance = TOLERANCES[policy.compute_dtype]
    if stayed.mean <= tolerance.doubtful < followed.mean:
        stale = "the engine still samples with the old weights"
        return replace(checked, found=found, faults=(stale, *checked.faults))
    if stayed.mean <= tolerance.wrong:
        weak = "the change was too small to distinguish new weights from old ones"
        return replace(checked, found=found, doubts=(weak, *checked.doubts))
    return replace(checked, found=found)


def check_restored(
    config: RunConfig,
    sync: EngineSync,
    requests: Sequence[AsyncRolloutRequest],
    loop: asyncio.Runner,
) -> Checked[Difference]:
    """Sync the engine to the policy's own weights, and compare again.

    Raises:
        SkipCheckError: for an engine without weights.
        EngineError: if the sync fails.
    """
    skip_scripted(config)
    synced = loop.run(_sync(config, sync, prompts_of(requests), AS_BEFORE))
    checked = judge(config, sync.policy, compare(config, sync.policy, synced.samples))
    return _with_sync(checked, synced, AS_BEFORE)


@contextmanager
def negated_weights(policy: PolicyModel) -> Iterator[None]:
    """Change the sign of every weight during the block.

    This changes every tensor, copies none, and is undone to the last bit.
    """
    _negate(policy)
    try:
        yield
    finally:
        _negate(policy)


@torch.no_grad()
def _negate(policy: PolicyModel) -> None:
    for _, weight in policy.named_weights():
        weight.neg_()


async def _sync(
    config: RunConfig, sync: EngineSync, prompts: Sequence[Sequence[int]], version: int
) -> Synced:
    started = monotonic()
    await bounded(sync.sync(version), "the weight sync")
    seconds = monotonic() - started
    completions = await bounded(sample(config, sync.engine, prompts, version), "sampling")
    # As in a run, the engine sleeps while the trainer scores.
    await bounded(sync.sleep(), "freeing memory")
    pairs = zip(prompts, completions, strict=True)
    return Synced(
        tuple(Sample.of_completion(prompt, completion) for prompt, completion in pairs),
        frozenset(span.version for done in completions for span in done.weight_versions),
        seconds,
    )


def _with_sync(checked: Checked[Difference], synced: Synced, version: int) -> Checked[Difference]:
    """Add the sync's time, and a fault if the engine reported another policy version."""
    faults = checked.faults
    if not synced.versions <= {version}:
        found = ", ".join(map(str, sorted(synced.versions, key=str)))
        faults += (f"the engine reported policy version {found}, not {version}",)
    return replace(checked, found=f"{synced.seconds:.2f} s, then {checked.found}", faults=faults)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that the trainer could allocate on its device."""
    give_back_cached(device)
    return torch.get_device_module(device).mem_get_info(device)[0]
