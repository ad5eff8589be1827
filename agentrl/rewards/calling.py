"""Call a scorer on the event loop, on a thread, or in a process."""

import asyncio
import pickle
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from aiolimiter import AsyncLimiter

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import PluginError, RewardError, WorkerLostError
from agentrl.plugins.call import (
    ExecutionMode,
    PerLoop,
    accepted_keywords,
    call_bounded,
    call_method,
    check_takes,
    contained,
    with_event_loop,
)
from agentrl.plugins.remote import RemoteObject
from agentrl.rewards.loading import (
    GIVEN,
    LoadedScorer,
    bundled_of,
    choose_scorer,
    is_async,
    parts_of,
)
from agentrl.rewards.pool import ScorePool, check_sendable
from agentrl.rewards.scoring import Score, ScoreFn, WeightedScorers, make_arguments, read_score
from agentrl.rollout.records import unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.sandbox.factory import SharedSandbox
from agentrl.sandbox.grading import grading_semaphore

NAME = "agentrl-reward"
"""Name of the tasks that run scorers, for the watchdog."""


class ScoreCaller:
    """Calls scorers with a time limit, and holds what they share: processes, sandbox, rate limit.

    It can be used from several event loops. Each has a sandbox and a rate limit of its own. Call
    `close` on each loop after its last score.

    An `async` scorer runs on the event loop. A plain one runs in the manager's mode, except a
    bundled one that must run in a process.

    Args:
        scorer: One scorer, or several weighted ones.
        config: Time-out, rate limit, processes, sandbox.
        mode: Where plain scorers run.
        arguments: Names of the arguments that each call passes; None: not known.

    Raises:
        PluginError: If a scorer must run in a process and cannot be sent to one, or does not take
            the arguments.
    """

    def __init__(
        self,
        scorer: ScoreFn,
        config: RewardConfig,
        mode: ExecutionMode,
        arguments: Collection[str] | None = GIVEN,
    ) -> None:
        self._scorer, self._config, self._mode = scorer, config, mode
        self._pool = ScorePool(
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            max_waiting=config.max_concurrent_scores,
        )
        interval_s = 1 / config.rate_limit if config.rate_limit else None
        self._limiters = PerLoop(lambda: AsyncLimiter(1, interval_s) if interval_s else None)
        self._sandbox = SharedSandbox(config.sandbox)
        for index, part in enumerate(parts_of(scorer)):
            if arguments is not None:
                _check_signature(part, arguments, config, index)
            if self._needs_process(part):
                check_sendable(part)

    async def score(self, request: AsyncRolloutRequest) -> Score:
        """Score one finished request, by one scorer or by several at once.

        Cancelling cancels an `async` scorer and kills one in a process. A scorer that blocks a
        thread runs on there.

        Raises:
            RewardError: If a scorer returned no finite number.
            Exception: What the scorer raised, or `TimeoutError`.
        """
        started = time.monotonic()
        request.metrics["seconds_reward_started"] = unix_time(started)
        try:
            if not isinstance(self._scorer, WeightedScorers):
                returned = await self.call(self._scorer, make_arguments(request))
                return contained(partial(read_score, returned))
            parts = self._scorer.parts
            calls = (self.call(part.scorer, make_arguments(request)) for part in parts)
            results = await asyncio.gather(*calls, return_exceptions=True)
            return contained(partial(self._scorer.combine, results))
        finally:
            request.metrics["seconds_reward"] = time.monotonic() - started

    async def call(self, scorer: ScoreFn, arguments: Mapping[str, Any]) -> Any:
        """Call a scorer as soon as the rate limit allows.

        Raises:
            Exception: What the scorer raised, or `TimeoutError`.
        """
        scorer = choose_scorer(scorer, str(arguments.get("data_source")))
        arguments = accepted_keywords(scorer, arguments)
        if (limiter := self._limiters.get()) is not None:
            await limiter.acquire()
        if isinstance(scorer, LoadedScorer) and scorer.remote is not None:
            call = partial(_call_remote, scorer.remote, arguments)
            return await call_bounded(call, timeout_s=self._config.timeout_s, name=NAME)
        if self._needs_process(scorer):
            return await self._pool.run(scorer, arguments)
        bundled = bundled_of(scorer)
        runs_code = bundled is not None and bundled.needs_sandbox
        # Code computes, so as many solutions run at once as there are cores.
        async with grading_semaphore() if runs_code else nullcontext():
            extra = {"sandbox": self._sandbox.get()} if runs_code else {}
            call = partial(_call, scorer, {**arguments, **extra})
            return await call_bounded(call, timeout_s=self._config.timeout_s, name=NAME)

    async def close(self) -> None:
        """Release processes and sandbox. May be called twice."""
        await self._pool.close()
        for part in parts_of(self._scorer):
            if isinstance(part, LoadedScorer):
                await part.close()
        await self._sandbox.close()

    def _needs_process(self, scorer: ScoreFn) -> bool:
        bundled = bundled_of(scorer)
        modes = (self._mode, bundled and bundled.mode)
        return ExecutionMode.PROCESS in modes and not is_async(scorer)


def _check_signature(
    scorer: ScoreFn, arguments: Collection[str], config: RewardConfig, index: int
) -> None:
    bundled = bundled_of(scorer)
    extra = ["sandbox"] if bundled and bundled.needs_sandbox else []
    try:
        check_takes(scorer, (), [*arguments, *extra])
    except PluginError as error:
        place = f"functions[{index}]" if config.functions else "custom_reward_function"
        error.details["key"] = f"reward.{place}"
        raise


async def _call(scorer: ScoreFn, arguments: Mapping[str, Any]) -> Any:
    """Call a scorer. A plain one has an event loop on its thread, as on the main thread."""
    if is_async(scorer):
        return await call_method(scorer, **arguments)
    return await call_method(partial(with_event_loop, partial(scorer, **arguments)))


async def _call_remote(remote: RemoteObject, arguments: Mapping[str, Any]) -> Any:
    """Call a `HostedScorer`.

    Raises:
        RewardError: If its process died.
        Exception: What the scorer raised.
    """
    try:
        value, error = pickle.loads(await remote.call("score", pickle.dumps(dict(arguments))))
    except WorkerLostError as lost:
        raise RewardError(f"the process of the scorer was lost: {lost}") from None
    if error is not None:
        raise error
    return value
