"""Roll out many requests at once: groups, bounded concurrency, and the failure policy."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple

from agentrl.config.schema.run import DataConfig, RolloutConfig, ValKwargsConfig
from agentrl.data.rows import Prompt
from agentrl.engines.protocol import CompletionSource, SamplingParams
from agentrl.errors import Fault, RolloutError
from agentrl.plugins.watchdog import LoopWatchdog
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import CallJudge, FailureSummary
from agentrl.rollout.records import Budgets, Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.scheduling import ConcurrentScheduler, LockstepScheduler, Scheduler, rare_gc
from agentrl.rollout.seeding import draw_seed
from agentrl.rollout.states import RequestState, StopReason

_UNBOUNDED = 1 << 30
"""Token limit of a call; the budgets of the request set the real one."""


RunRequest = Callable[
    [AsyncRolloutRequest, RolloutContext, CompletionSource], Awaitable[AsyncRolloutRequest]
]
"""Drives one pending request to its end and returns it. Raises nothing but a cancellation of its
caller. `run_request`, the state machine, is the default."""


class SamplingPlan(NamedTuple):
    """Purpose, number of samples and sampling parameters of a rollout."""

    name: str
    """Prefix of the group ids: `train`, `greedy`, or `val-` and the name of the set."""
    n: int
    """Samples per prompt."""
    sampling: SamplingParams
    index_offset: int = 0
    """Index of the first prompt among all prompts of the step. A prompt that is repeated in a later
    batch of the step gets other seeds."""


class RolloutManager:
    """Make requests from prompts and drive them to their ends.

    Args:
        context: Engine, template, parser, tools and interactions of the run.
        rollout: Samples per prompt, sampling, budgets, concurrency, failure policy.
        data: Maximum lengths of prompts and responses.
        run: Drives one request.

    Example:
        >>> requests = manager.make_requests(prompts, manager.train_plan())
        >>> finished = await manager.rollout(requests)
    """

    def __init__(
        self,
        context: RolloutContext,
        rollout: RolloutConfig,
        data: DataConfig,
        run: RunRequest = run_request,
    ) -> None:
        self.context = context
        self._run = run
        self._rollout = rollout
        self._call_judge = CallJudge(rollout.failure.max_failed_calls_frac)
        self.budgets = make_budgets(rollout, data, context.engine.max_model_len)

    def train_plan(self) -> SamplingPlan:
        """The plan of training."""
        rollout = self._rollout
        return SamplingPlan("train", rollout.n, self._sampling(rollout))

    def greedy_plan(self) -> SamplingPlan:
        """The plan of one greedy rollout per prompt, in addition to the training samples."""
        return SamplingPlan("greedy", 1, self._sampling(ValKwargsConfig(temperature=0.0)))

    def val_plan(self, name: str) -> SamplingPlan:
        """The plan of validation on the set `name` (`val_kwargs`)."""
        val = self._rollout.val_kwargs
        return SamplingPlan(f"val-{name}", val.n, self._sampling(val))

    def _sampling(self, settings: RolloutConfig | ValKwargsConfig) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=_UNBOUNDED,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=tuple(self._rollout.stop),
            stop_token_ids=self.context.template.stop_token_ids,
        )

    def make_requests(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        *,
        step: int = 0,
        samples: Sequence[tuple[int, int]] | None = None,
    ) -> list[AsyncRolloutRequest]:
        """Make a group of `plan.n` requests for each prompt; groups are contiguous and in order.

        Group ids and seeds are functions of the configured seed, the plan, the step and the row. So
        the same run makes the same requests, on one rank or on several.

        Args:
            prompts: The whole batch.
            plan: Number of samples and sampling parameters.
            step: Training step; part of ids and seeds.
            samples: The requests to make, as (index in `prompts`, index in the group); None: all
                of them.
        """
        if samples is None:
            samples = [(index, offset) for index in range(len(prompts)) for offset in range(plan.n)]
        requests: list[AsyncRolloutRequest] = []
        for index, offset in samples:
            prompt_index = plan.index_offset + index
            uid = f"{plan.name}-{step}-{prompts[index].index}-{prompt_index}"
            request = AsyncRolloutRequest.from_prompt(
                prompts[index],
                request_id=f"{uid}-{offset}",
                batch_data_id=prompt_index,
                rollout_offset=offset,
                uid=uid,
                sampling=plan.sampling,
                budgets=self.budgets,
                seed=draw_seed(f"{self._rollout.seed}:{uid}:{offset}"),
            )
            requests.append(request)
        return requests

    async def rollout(
        self,
        requests: Sequence[AsyncRolloutRequest],
        *,
        on_finished: Callable[[AsyncRolloutRequest], None] | None = None,
    ) -> list[AsyncRolloutRequest]:
        """Drive all requests to their ends and apply the failure policy.

        Raises:
            RolloutError: See `apply_failure_policy`.
            Exception: See `drive`.
        """
        finished = await self.drive(requests, on_finished=on_finished)
        self.apply_failure_policy(finished)
        return finished

    async def drive(
        self,
        requests: Sequence[AsyncRolloutRequest],
        *,
        on_finished: Callable[[AsyncRolloutRequest], None] | None = None,
    ) -> list[AsyncRolloutRequest]:
        """Drive all requests to their ends and return them in the same order.

        A failed request does not affect the others. Under `retry` the result has the last attempt
        of each request. A cancellation ends every request as ABORTED and releases its plug-ins
        before it is raised. Meanwhile garbage collections are rare (`rare_gc`).

        Args:
            requests: Pending requests.
            on_finished: Called with each request after its last attempt; for a progress bar.

        Raises:
            TransitionError: If a request is not pending.
            RolloutError: In deterministic mode, if another such rollout is using the engine.
            Exception: An error of `on_finished`. It ends the rollout. Several errors at once are
                raised as an `ExceptionGroup`.
        """

        async def drive_one(
            index: int, request: AsyncRolloutRequest, scheduler: Scheduler
        ) -> AsyncRolloutRequest:
            async with scheduler.admit(index) as source:
                done = await self._attempt(request, source)
            if on_finished:
                on_finished(done)
            return done

        try:
            # The watchdog reports a tool that blocks the event loop, and with it all requests.
            with LoopWatchdog(), rare_gc():
                async with self._scheduler(len(requests)) as scheduler, asyncio.TaskGroup() as tg:
                    tasks = [
                        tg.create_task(drive_one(index, request, scheduler))
                        for index, request in enumerate(requests)
                    ]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as group:
            failure = group.exceptions[0] if len(group.exceptions) == 1 else group
        finally:
            abort_pending(requests)
        raise failure

    def _scheduler(self, num_requests: int) -> AbstractAsyncContextManager[Scheduler]:
        engine, capacity = self.context.engine, self._rollout.max_concurrent_requests
        if self._rollout.deterministic:
            return LockstepScheduler(engine, num_requests=num_requests, capacity=capacity)
        return nullcontext(ConcurrentScheduler(engine, capacity=capacity))

    async def _attempt(
        self, request: AsyncRolloutRequest, source: CompletionSource
    ) -> AsyncRolloutRequest:
        failure = self._rollout.failure
        retries = failure.max_retries if failure.policy == "retry" else 0
        fresh = request.model_copy(deep=True) if retries else request
        done = await self.drive_once(request, source)
        while can_be_retried(done) and done.attempt < retries:
            fresh = next_attempt(fresh)
            done = await self.drive_once(fresh.model_copy(deep=True), source)
        return done

    async def drive_once(
        self, request: AsyncRolloutRequest, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive one pending request to its end, without retries (see `RunRequest`).

        Args:
            request: The request.
            source: Generates its completions.
        """
        return await self._run(request, self.context, source)

    def apply_failure_policy(
        self, finished: Sequence[AsyncRolloutRequest], summary: FailureSummary | None = None
    ) -> None:
        """Apply the policy for failed requests. Call it again after scoring, which may fail more.

        Args:
            finished: Requests that have ended.
            summary: Summary of the batch over all ranks; None: that of `finished`.

        Raises:
            RolloutError: If a request failed under `failure.policy: raise`, if more than
                `max_failed_frac` of the batch failed, or more than `max_failed_calls_frac` of the
                calls of a tool.
        """
        summary = summary or FailureSummary.of(finished)
        failure = self._rollout.failure
        allowed = 0.0 if failure.policy == "raise" else failure.max_failed_frac
        if summary.num_failed > allowed * summary.num_requests:
            raise RolloutError(
                f"{summary.num_failed} of {summary.num_requests} requests failed",
                reasons=summary.describe_reasons(),
                expected=f"at most {allowed:.0%} (rollout.failure)",
            )
        self._call_judge.judge(summary.calls)
        if failure.policy == "drop_group":
            for request in finished:
                if request.uid in summary.groups:
                    request.dropped = "a sample of its group failed"


def abort_pending(requests: Sequence[AsyncRolloutRequest]) -> None:
    """Abort the requests that did not start before the rollout was cancelled."""
    for request in requests:
        if not request.is_finished:
            error = Failure(fault=Fault.LIMIT, kind="CancelledError", message="not started", turn=0)
            request.finish(StopReason.ABORTED, error)


def can_be_retried(request: AsyncRolloutRequest) -> bool:
    """Whether a request failed, and was not aborted on purpose."""
    return request.state is RequestState.FAILED and request.stop_reason is not StopReason.ABORTED


def next_attempt(request: AsyncRolloutRequest) -> AsyncRolloutRequest:
    """Make a new request for the same sample: another request_id, the same uid."""
    attempt = request.attempt + 1
    root = request.request_id.removesuffix(f"~{request.attempt}")
    return request.model_copy(
        deep=True, update={"attempt": attempt, "request_id": f"{root}~{attempt}"}
    )


def make_budgets(rollout: RolloutConfig, data: DataConfig, engine_len: int) -> Budgets:
    """Make the budgets of a request from the configuration and the context length of the engine."""
    turns = rollout.multi_turn
    return Budgets(
        max_response_tokens=data.max_response_length,
        max_model_len=min(rollout.max_model_len or engine_len, engine_len),
        max_turn_tokens=turns.max_tokens_per_turn,
        max_observation_tokens=turns.max_tool_response_length,
        max_assistant_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_tool_calls=turns.max_tool_calls,
        timeout_s=rollout.request_timeout_s,
    )
