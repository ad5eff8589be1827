"""Memory that engine and trainer have between them: is it given back, and taken again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import torch

from agentrl.config.schema import RunConfig
from agentrl.engines import Engine
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.doctor.engine import AS_LOADED, bounded, prompts_of, sample
from agentrl.trainer.doctor.records import Checked
from agentrl.trainer.hand_over import HandOver
from agentrl.workers.memory import give_back_cached
from agentrl.workers.model import PolicyModel


def check_hand_over(
    config: RunConfig,
    policy: PolicyModel,
    engine: Engine,
    requests: Sequence[AsyncRolloutRequest],
    runner: asyncio.Runner,
) -> Checked[HandOver]:
    """Have the engine sleep, wake with the policy's weights, sample, and sleep again.

    It is left asleep, as it is while a run scores and trains.

    Raises:
        SkipCheckError: where no request has a prompt to sample from.
        EngineError: where one of these fails.
    """
    # Once, whatever the run allows: a sync that fails now and then is to be seen here.
    hand_over = replace(HandOver.of(config, engine, policy), max_attempts=1)
    if not hand_over.gives_memory:
        return Checked(hand_over, "nothing to hand over on this machine")
    before, begun = _free_bytes(policy.world.device), monotonic()
    runner.run(bounded(hand_over.give_memory(), "giving memory back"))
    given, slept = _free_bytes(policy.world.device) - before, monotonic()
    runner.run(bounded(hand_over.renew(AS_LOADED), "taking memory again"))
    woken = monotonic()
    runner.run(bounded(sample(config, engine, prompts_of(requests), AS_LOADED), "sampling"))
    runner.run(bounded(hand_over.give_memory(), "giving memory back once more"))
    told = f"{given / 1e9:.1f} GB given back in {slept - begun:.1f} s, taken again with the "
    told += f"weights in {woken - slept:.1f} s; answers"
    kept = "the engine gave no memory back: the update has as little as beside an engine awake"
    return Checked(hand_over, told, (kept,) if given <= 0 else ())


def _free_bytes(device: torch.device) -> int:
    """Count what the trainer could take of its device."""
    give_back_cached(device)
    return torch.get_device_module(device).mem_get_info(device)[0]
