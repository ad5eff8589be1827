"""Weights that really change: does the engine follow, there and back."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

import torch

from agentrl.config.schema import RunConfig
from agentrl.engines import Completion, Engine, EngineCall, SamplingParams
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.doctor.engine import bounded
from agentrl.trainer.doctor.log_probs import (
    TOLERANCES,
    Difference,
    Sample,
    compare,
    judge,
    refuse_script,
)
from agentrl.trainer.doctor.records import Checked, SkipCheckError
from agentrl.training.model import PolicyModel
from agentrl.training.weight_sync import sync_weights

NUM_TOKENS = 32
"""Tokens of each completion by new weights."""
CHANGED, AS_BEFORE = 1, 2
"""Versions of the two syncs."""


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
    policy: PolicyModel,
    engine: Engine,
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
    prompts = _prompts(requests)
    with turned_over(policy):
        synced = runner.run(_sync(config, policy, engine, prompts, CHANGED))
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
    policy: PolicyModel,
    engine: Engine,
    requests: Sequence[AsyncRolloutRequest],
    runner: asyncio.Runner,
) -> Checked[Difference]:
    """Bring the engine back to the policy's weights, and compare once more.

    Raises:
        SkipCheckError: for an engine without weights.
        EngineError: where the sync fails.
    """
    refuse_script(config)
    synced = runner.run(_sync(config, policy, engine, _prompts(requests), AS_BEFORE))
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
    config: RunConfig,
    policy: PolicyModel,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    version: int,
) -> Synced:
    begun = monotonic()
    await bounded(sync_weights(policy, engine, version=version), "the weight sync")
    seconds = monotonic() - begun
    completions = await bounded(_sample(config, engine, prompts, version), "sampling")
    pairs = zip(prompts, completions, strict=True)
    return Synced(
        tuple(Sample.of_completion(prompt, completion) for prompt, completion in pairs),
        frozenset(span.version for done in completions for span in done.weight_versions),
        seconds,
    )


async def _sample(
    config: RunConfig, engine: Engine, prompts: Sequence[Sequence[int]], version: int
) -> list[Completion]:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=config.rollout.temperature)
    calls = [
        EngineCall(input_ids=prompt, sampling=sampling, request_id=f"doctor-{version}-{place}")
        for place, prompt in enumerate(prompts)
    ]
    done: list[Completion] = []
    for outcome in await engine.generate_together(calls):
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done


def _prompts(requests: Sequence[AsyncRolloutRequest]) -> list[list[int]]:
    prompts = [request.prompt_ids for request in requests if request.num_prompt_tokens]
    if not prompts:
        raise SkipCheckError("because no request has a prompt")
    return prompts


def _wrong_version(synced: Synced, version: int) -> list[str]:
    if synced.versions <= {version}:
        return []
    found = ", ".join(map(str, sorted(synced.versions, key=str)))
    return [f"tokens came back as of the weights {found}, not {version}"]
