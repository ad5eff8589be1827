"""The engine: does it start, do conversations end, does it leave nothing behind."""

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

T = TypeVar("T")

NUM_ROWS = 4
"""Rows that are rolled out, once each."""
NUM_TOKENS = 32
"""Tokens of each answer that `sample` asks for."""
AS_LOADED, CHANGED, AS_BEFORE = range(3)
"""Versions of the syncs; the weights that an engine starts with are 0 as well."""
TIMEOUT_S = 900.0
"""Seconds of anything that is asked of the engine."""
_HELPERS = ("resource_tracker", "forkserver")
"""Python's own processes, which end with this one."""


def check_engine(
    config: RunConfig,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    runner: asyncio.Runner,
) -> Checked[Engine]:
    """Start the configured engine.

    Args:
        config: Of the run.
        policy: Whose weights it is to serve.
        tokenizer: Of the policy.
        stack: Stops the engine when it unwinds.
        runner: The loop that the engine will live on.

    Raises:
        AgentRLError: where it does not start, with what to change.
    """
    engine = build_engine(
        config, policy.lm, tokenizer, device=policy.world.device, dtype=policy.compute_dtype
    )
    stack.callback(lambda: runner.run(engine.close()))
    told = f"{describe_engine(config)}; sequences of {engine.max_model_len} tokens"
    return Checked(engine, told)


def check_rollout(
    config: RunConfig, setup: RolloutSetup, data: RunData, engine: Engine, runner: asyncio.Runner
) -> Checked[list[AsyncRolloutRequest]]:
    """Roll out and score a few rows of the run.

    Raises:
        EngineError: where that takes too long.
    """
    manager = make_manager(config, setup, engine)
    rows = list(islice(chain(data.train, *data.val.values()), NUM_ROWS))
    requests = manager.make_requests(rows, manager.train_plan()._replace(n=1))
    begun = monotonic()
    finished = runner.run(bounded(manager.drive(requests), "the rollout"))
    seconds = monotonic() - begun
    runner.run(bounded(setup.plugins.rewards.score(finished), "the scoring"))
    runner.run(bounded(setup.plugins.shutdown(), "the end of the plug-ins"))
    return Checked(finished, _describe(finished, seconds), faults=tuple(_failures(finished)))


def check_end(engine: Engine, before: set[int], runner: asyncio.Runner) -> Checked[None]:
    """Stop the engine, and look for processes that it left.

    Args:
        engine: Running, or closed already.
        before: `child_pids` of before its start.
        runner: The loop that it runs on.
    """
    runner.run(bounded(engine.close(), "the end of the engine"))
    left = child_pids() - before
    told = tuple(f"process {pid} is left: {_command(pid)}" for pid in sorted(left))
    return Checked(None, "stopped", faults=told)


def child_pids() -> set[int]:
    """List this process's children, theirs too, but for Python's own helpers."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if not any(h in _command(child.pid) for h in _HELPERS)}


async def sample(
    config: RunConfig, engine: Engine, prompts: Sequence[Sequence[int]], version: int
) -> list[Completion]:
    """Have each prompt answered once, in a few tokens.

    Args:
        config: Of the run.
        engine: Awake.
        prompts: Token ids.
        version: Of the weights, for the names of the requests.

    Raises:
        EngineError: where one cannot be.
    """
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


def prompts_of(requests: Sequence[AsyncRolloutRequest]) -> list[list[int]]:
    """Give the prompts of requests that came so far.

    Raises:
        SkipCheckError: where none did.
    """
    prompts = [request.prompt_ids for request in requests if request.num_prompt_tokens]
    if not prompts:
        raise SkipCheckError("because no request has a prompt")
    return prompts


async def bounded(work: Coroutine[Any, Any, T], what: str) -> T:
    """Await work of the engine, and not for ever.

    Raises:
        EngineError: after `TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await work
    except TimeoutError:
        raise EngineError(
            f"{what} took longer than {TIMEOUT_S:g} s",
            expected="a faster engine, or a smaller data.max_response_length to look with",
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
