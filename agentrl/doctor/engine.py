"""Check that the engine starts, answers conversations, and stops without leaving processes."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from time import monotonic
from typing import Any, TypeVar

import psutil
from transformers import PreTrainedTokenizerBase

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.report import Checked, SkipCheckError
from agentrl.engines import Completion, Engine, EngineCall, SamplingParams
from agentrl.errors import EngineError
from agentrl.rollout.failures import count_calls
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.engine_factory import build_engine, describe_engine
from agentrl.trainer.setup.rollout_setup import RolloutSetup, make_manager
from agentrl.workers.model import PolicyModel
from agentrl.workers.weight_sync import sync_weights

T = TypeVar("T")

NUM_ROWS = 4
"""Rows that are rolled out, one conversation each."""
NUM_TOKENS = 32
"""Maximum tokens of each answer of `sample`."""
AS_LOADED, CHANGED, AS_BEFORE = range(3)
"""Policy versions of the syncs; an engine starts with version 0."""
TIMEOUT_S = 900.0
"""Maximum seconds of one engine operation."""
_HELPERS = ("resource_tracker", "forkserver")
"""Processes of Python itself, which end with this one."""


def check_engine(
    config: RunConfig,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    loop: asyncio.Runner,
) -> Checked[Engine]:
    """Start the configured engine.

    Args:
        config: The run.
        policy: The engine serves its weights.
        tokenizer: The policy's tokenizer.
        stack: Stops the engine when it unwinds.
        loop: The event loop of the engine.

    Raises:
        AgentRLError: if it does not start; says what to change.
    """
    engine = build_engine(
        config, policy.lm, tokenizer, device=policy.world.device, dtype=policy.compute_dtype
    )
    stack.callback(lambda: loop.run(engine.close()))
    if policy.adapters is not None:  # no engine starts with the merged weights
        syncing = sync_weights(policy, engine, version=AS_LOADED)
        loop.run(bounded(syncing, "the first weight sync"))
    found = f"{describe_engine(config)}; sequences of {engine.max_model_len} tokens"
    return Checked(engine, found)


def check_rollout(
    config: RunConfig, setup: RolloutSetup, data: RunData, engine: Engine, loop: asyncio.Runner
) -> Checked[list[AsyncRolloutRequest]]:
    """Roll out and score a few rows of the run.

    Raises:
        EngineError: if that takes too long.
    """
    manager = make_manager(config, setup, engine)
    rows = list(islice(chain(data.train, *data.val.values()), NUM_ROWS))
    requests = manager.make_requests(rows, manager.train_plan()._replace(n=1))
    started = monotonic()
    finished = loop.run(bounded(manager.drive(requests), "the rollout"))
    seconds = monotonic() - started
    loop.run(bounded(setup.plugins.rewards.score(finished), "the scoring"))
    loop.run(bounded(setup.plugins.shutdown(), "the shutdown of the plug-ins"))
    return Checked(finished, _describe(finished, seconds), faults=tuple(_failures(finished)))


def check_end(engine: Engine, before: set[int], loop: asyncio.Runner) -> Checked[None]:
    """Stop the engine, and report processes that it left.

    Args:
        engine: The engine, running or already closed.
        before: `child_pids` before the engine was started.
        loop: The event loop of the engine.
    """
    loop.run(bounded(engine.close(), "the engine's shutdown"))
    left = sorted(child_pids() - before)
    faults = tuple(f"process {pid} is still running: {_command(pid)}" for pid in left)
    return Checked(None, "stopped", faults=faults)


def child_pids() -> set[int]:
    """List the descendants of this process, without Python's own helper processes."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if not any(h in _command(child.pid) for h in _HELPERS)}


async def sample(
    config: RunConfig, engine: Engine, prompts: Sequence[Sequence[int]], version: int
) -> list[Completion]:
    """Sample one short answer to each prompt.

    Args:
        config: The run.
        engine: The engine, awake.
        prompts: Token ids.
        version: Policy version, part of the request ids.

    Raises:
        EngineError: if a prompt cannot be answered.
    """
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=config.rollout.temperature)
    calls = [
        EngineCall(input_ids=prompt, sampling=sampling, request_id=f"doctor-{version}-{index}")
        for index, prompt in enumerate(prompts)
    ]
    done: list[Completion] = []
    for outcome in await engine.generate_together(calls):
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done


def prompts_of(requests: Sequence[AsyncRolloutRequest]) -> list[list[int]]:
    """Return the prompts of those requests that have one.

    Raises:
        SkipCheckError: if none has.
    """
    prompts = [request.prompt_ids for request in requests if request.num_prompt_tokens]
    if not prompts:
        raise SkipCheckError("because no request has a prompt")
    return prompts


async def bounded(work: Coroutine[Any, Any, T], what: str) -> T:
    """Await an engine operation for a bounded time.

    Raises:
        EngineError: after `TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await work
    except TimeoutError:
        raise EngineError(
            f"{what} took longer than {TIMEOUT_S:g} s",
            expected="a faster engine, or a smaller data.max_response_length for this check",
        ) from None


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return "resource_tracker"


def _describe(finished: Sequence[AsyncRolloutRequest], seconds: float) -> str:
    ends = Counter(str(request.stop_reason) for request in finished)
    calls = Counter(
        f"{call.name or 'unnamed'} {call.outcome}"
        for request in finished
        for turn in request.turns
        for call in turn.calls
    )
    turns = [turn for request in finished for turn in request.turns]
    sampled = sum(turn.num_tokens for turn in turns if turn.role == "assistant")
    return (
        f"{len(finished)} conversations: {_counted(ends)}; "
        f"tool calls: {_counted(calls) or 'none'}; "
        f"{sampled} tokens sampled, {sampled / max(seconds, 1e-9):.0f} a second"
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


def _failures(finished: Sequence[AsyncRolloutRequest]) -> list[str]:
    failed = [
        f"{request.request_id}: {error.fault}: {error.kind}: {error.message}"
        for request in finished
        if request.state is RequestState.FAILED and (error := request.error) is not None
    ]
    counts = count_calls(finished).items()
    return failed + [count.describe(what) for what, count in counts if count.num_failed]
