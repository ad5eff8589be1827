"""Weights that really change: does the engine follow, there and back."""

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
    refuse_script,
)
from agentrl.doctor.report import Checked
from agentrl.engines import Engine
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.engine_sync import EngineSync
from agentrl.workers.memory import give_back_cached
from agentrl.workers.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Synced:
    """What an engine sampled by weights that it was just given."""

    samples: tuple[Sample, ...]
    versions: frozenset[int | None]
    """By which weights, as the engine says."""
    seconds: float
    """Of the sync alone."""


def check_sync(
    config: RunConfig,
    engine_sync: EngineSync,
    requests: Sequence[AsyncRolloutRequest],
    runner: asyncio.Runner,
) -> Checked[Difference]:
    """Change every weight, bring the engine to them, and see that it samples by them.

    The policy is as it was when this returns or raises; the engine is not (`check_way_back`).

    Raises:
        SkipCheckError: for an engine without weights.
        EngineError: where the sync fails.
    """
    refuse_script(config)
    policy, prompts = engine_sync.policy, prompts_of(requests)
    with turned_over(policy):
        synced = runner.run(_sync(config, engine_sync, prompts, CHANGED))
        followed = compare(config, policy, synced.samples)
    stayed = compare(config, policy, synced.samples)
    judged = judge(config, policy, followed)
    told = f"{synced.seconds:.2f} s, then {judged.found}; by the weights of before: mean "
    told += f"{stayed.mean:.1e}"
    judged = replace(judged, found=told, faults=(*judged.faults, *_wrong_version(synced, CHANGED)))
    tolerance = TOLERANCES[policy.compute_dtype]
    if stayed.mean <= tolerance.doubtful < followed.mean:
        stale = "the engine still samples by the weights of before"
        return replace(judged, faults=(stale, *judged.faults))
    if stayed.mean <= tolerance.wrong:
        weak = "the change moved too little to tell new weights from old ones"
        return replace(judged, doubts=(weak, *judged.doubts))
    return judged


def check_way_back(
    config: RunConfig,
    engine_sync: EngineSync,
    requests: Sequence[AsyncRolloutRequest],
    runner: asyncio.Runner,
) -> Checked[Difference]:
    """Bring the engine back to the policy's weights, and compare once more.

    Raises:
        SkipCheckError: for an engine without weights.
        EngineError: where the sync fails.
    """
    refuse_script(config)
    policy = engine_sync.policy
    synced = runner.run(_sync(config, engine_sync, prompts_of(requests), AS_BEFORE))
    judged = judge(config, policy, compare(config, policy, synced.samples))
    told = f"{synced.seconds:.2f} s, then {judged.found}"
    return replace(judged, found=told, faults=(*judged.faults, *_wrong_version(synced, AS_BEFORE)))


@contextmanager
def turned_over(policy: PolicyModel) -> Iterator[None]:
    """Change the sign of every weight during a block.

    This moves every tensor, needs no copy of one, and is undone to the last bit.
    """
    _change_signs(policy)
    try:
        yield
    finally:
        _change_signs(policy)


@torch.no_grad()
def _change_signs(policy: PolicyModel) -> None:
    for _, weight in policy.named_weights():
        weight.neg_()


async def _sync(
    config: RunConfig, engine_sync: EngineSync, prompts: Sequence[Sequence[int]], version: int
) -> Synced:
    begun = monotonic()
    await bounded(engine_sync.sync(version), "the weight sync")
    seconds = monotonic() - begun
    completions = await bounded(sample(config, engine_sync.engine, prompts, version), "sampling")
    # As in a run, nothing is scored beside an engine that is awake.
    await bounded(engine_sync.sleep(), "giving memory back")
    pairs = zip(prompts, completions, strict=True)
    return Synced(
        tuple(Sample.of_completion(prompt, completion) for prompt, completion in pairs),
        frozenset(span.version for done in completions for span in done.weight_versions),
        seconds,
    )


def _wrong_version(synced: Synced, version: int) -> list[str]:
    if synced.versions <= {version}:
        return []
    found = ", ".join(map(str, sorted(synced.versions, key=str)))
    return [f"tokens came back as of the weights {found}, not {version}"]


def check_hand_over(
    config: RunConfig,
    policy: PolicyModel,
    engine: Engine,
    requests: Sequence[AsyncRolloutRequest],
    runner: asyncio.Runner,
) -> Checked[EngineSync]:
    """Have the engine sleep, wake with the policy's weights, sample, and sleep again.

    It is left asleep, as it is while a run scores and trains.

    Raises:
        SkipCheckError: where no request has a prompt to sample from.
        EngineError: where one of these fails.
    """
    # Once, whatever the run allows: a sync that fails now and then is to be seen here.
    engine_sync = replace(EngineSync.of(config, engine, policy), max_attempts=1)
    if not engine_sync.gives_memory:
        return Checked(engine_sync, "nothing to hand over on this machine")
    before, begun = _free_bytes(policy.world.device), monotonic()
    runner.run(bounded(engine_sync.sleep(), "giving memory back"))
    given, slept = _free_bytes(policy.world.device) - before, monotonic()
    runner.run(bounded(engine_sync.sync(AS_LOADED), "taking memory again"))
    woken = monotonic()
    runner.run(bounded(sample(config, engine, prompts_of(requests), AS_LOADED), "sampling"))
    runner.run(bounded(engine_sync.sleep(), "giving memory back once more"))
    told = f"{given / 1e9:.1f} GB given back in {slept - begun:.1f} s, taken again with the "
    told += f"weights in {woken - slept:.1f} s; answers"
    kept = "the engine gave no memory back: the update has as little as beside an engine awake"
    return Checked(engine_sync, told, (kept,) if given <= 0 else ())


def _free_bytes(device: torch.device) -> int:
    """Count what the trainer could take of its device."""
    give_back_cached(device)
    return torch.get_device_module(device).mem_get_info(device)[0]
