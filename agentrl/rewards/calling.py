"""One call of a scorer, where it belongs: on the event loop, on a thread, or in a process."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from aiolimiter import AsyncLimiter

from agentrl.config.schema.reward import RewardConfig
from agentrl.plugins.call import (
    ExecutionMode,
    PerLoop,
    call_bounded,
    call_method,
    contained,
    with_event_loop,
)
from agentrl.rewards.loading import (
    LoadedScorer,
    bundled_of,
    choose_scorer,
    is_async,
    parts_of,
)
from agentrl.rewards.pool import ScorePool, check_sendable
from agentrl.rewards.scoring import Score, ScoreFn, WeightedScorers, make_told, read_score
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.sandbox.factory import SharedSandbox
from agentrl.sandbox.grading import grading_semaphore

NAME = "agentrl-reward"
"""Of the tasks that run scorers, for the watchdog."""


class ScoreCaller:
    """Calls scorers, each within its time; holds what they share: processes, a sandbox, a pace.

    It may be used from several event loops, each of which has a sandbox, pace and room of its own.
    Call `close` on each, behind its last score.

    An `async` scorer runs on the event loop. A plain one runs in the manager's mode, except a
    bundled one that must run in a process.

    Args:
        scorer: One, or several.
        config: Time-out, rate limit, processes, sandbox.
        mode: Where plain scorers run.

    Raises:
        PluginError: for a scorer that is to run in a process, and cannot be sent to one.
    """

    def __init__(self, scorer: ScoreFn, config: RewardConfig, mode: ExecutionMode) -> None:
        self._scorer = scorer
        self._config = config
        self._mode = mode
        self._pool = ScorePool(
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            max_waiting=config.max_concurrent_scores,
        )
        self._limiters = PerLoop(self._make_limiter)
        self._sandbox = SharedSandbox(config.sandbox)
        for part in parts_of(scorer):
            if self._mode_of(part) is ExecutionMode.PROCESS and not is_async(part):
                check_sendable(part)

    async def score(self, request: AsyncRolloutRequest) -> Score:
        """Score one finished request, by one function or by several at once.

        Cancelling cancels an `async` scorer and kills one in a process; one that blocks a thread is
        left behind there.

        Raises:
            RewardError: where a scorer returned no finite number.
            Exception: what the scorer raised, or `TimeoutError`.
        """
        begun = time.monotonic()
        try:
            if not isinstance(self._scorer, WeightedScorers):
                returned = await self.call(self._scorer, make_told(request))
                return contained(partial(read_score, returned))
            parts = self._scorer.parts
            calls = (self.call(part.scorer, make_told(request)) for part in parts)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            return contained(partial(self._scorer.combine, outcomes))
        finally:
            request.metrics["seconds_reward"] = time.monotonic() - begun

    async def call(self, scorer: ScoreFn, told: Mapping[str, Any]) -> Any:
        """Call a scorer, as soon as the rate limit lets it begin.

        Raises:
            Exception: what the scorer raised, or `TimeoutError`.
        """
        scorer = choose_scorer(scorer, str(told.get("data_source")))
        if (limiter := self._limiters.get()) is not None:
            await limiter.acquire()
        if self._mode_of(scorer) is ExecutionMode.PROCESS and not is_async(scorer):
            return await self._pool.run(scorer, told)
        async with self._room_of(scorer):
            call = partial(_call, scorer, {**told, **self._resources(scorer)})
            return await call_bounded(call, timeout_s=self._config.timeout_s, name=NAME)

    async def close(self) -> None:
        """Give back processes and sandbox. May be called twice."""
        await self._pool.close()
        for part in parts_of(self._scorer):
            if isinstance(part, LoadedScorer):
                await part.close()
        await self._sandbox.close()

    def _mode_of(self, scorer: ScoreFn) -> ExecutionMode:
        bundled = bundled_of(scorer)
        needs_process = bundled is not None and bundled.mode is ExecutionMode.PROCESS
        return ExecutionMode.PROCESS if needs_process else self._mode

    def _room_of(self, scorer: ScoreFn) -> AbstractAsyncContextManager[None]:
        """Where code is run, as many solutions at once as there are cores: they compute."""
        bundled = bundled_of(scorer)
        return grading_semaphore() if bundled and bundled.needs_sandbox else nullcontext()

    def _resources(self, scorer: ScoreFn) -> dict[str, Any]:
        """What a bundled scorer is called with beside the convention."""
        bundled = bundled_of(scorer)
        if bundled is None or not bundled.needs_sandbox:
            return {}
        return {"sandbox": self._sandbox.get()}

    def _make_limiter(self) -> AsyncLimiter | None:
        rate = self._config.rate_limit
        return None if rate is None else AsyncLimiter(1, 1 / rate)


async def _call(scorer: ScoreFn, keywords: Mapping[str, Any]) -> Any:
    """Call a scorer; a plain one has an event loop on its thread, as it would on the main one."""
    if is_async(scorer):
        return await call_method(scorer, **keywords)
    return await call_method(partial(with_event_loop, partial(scorer, **keywords)))
