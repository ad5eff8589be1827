"""Roll out many requests at once: groups, bounded concurrency, and what becomes of failures."""

import asyncio
from collections.abc import Callable, Sequence
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
"""Token limit of a call before its request's budgets are applied."""


class SamplingPlan(NamedTuple):
    """For what, how often and how hot prompts are sampled."""

    name: str
    """Begins the ids of the plan's groups: `train`, `greedy`, or `val-` and the set's name."""
    n: int
    """Samples of one prompt."""
    sampling: SamplingParams
    index_offset: int = 0
    """Of the first prompt, among all of its step: one that takes several batches draws for each
    prompt anew, also for one that comes twice."""


class RolloutManager:
    """Makes requests of prompts and drives them to their ends.

    Args:
        context: Engine, template, parser, tools and interactions of the run.
        rollout: Samples per prompt, sampling, budgets, concurrency, failure policy.
        data: Lengths of prompts and responses.

    Example:
        >>> requests = manager.make_requests(prompts, manager.train_plan())
        >>> finished = await manager.rollout(requests)
    """

    def __init__(self, context: RolloutContext, rollout: RolloutConfig, data: DataConfig) -> None:
        self.context = context
        self._rollout = rollout
        self._call_judge = CallJudge(rollout.failure.max_failed_calls_frac)
        self.budgets = make_budgets(rollout, data, context.engine.max_model_len)

    def train_plan(self) -> SamplingPlan:
        """How training samples."""
        rollout = self._rollout
        return SamplingPlan("train", rollout.n, self._sampling(rollout))

    def greedy_plan(self) -> SamplingPlan:
        """How a prompt's greedy rollout is sampled, beside its training samples."""
        return SamplingPlan("greedy", 1, self._sampling(ValKwargsConfig(temperature=0.0)))

    def val_plan(self, name: str) -> SamplingPlan:
        """How validation on the set `name` samples (`val_kwargs`)."""
        val = self._rollout.val_kwargs
        return SamplingPlan(f"val-{name}", val.n, self._sampling(val))

    def _sampling(self, heat: RolloutConfig | ValKwargsConfig) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=_UNBOUNDED,
            temperature=heat.temperature,
            top_p=heat.top_p,
            top_k=heat.top_k,
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
        """Expand each prompt to a group of `plan.n` samples, which stand together in order.

        Group ids and seeds are functions of the configuration's seed, the plan, the step and the
        row, so that the same run makes the same requests, on one rank or on several.

        Args:
            prompts: The whole batch.
            plan: How often and how hot each is sampled.
            step: Enters ids and seeds.
            samples: Which to make: places in `prompts`, each with a number below `plan.n`; None:
                all of them.
        """
        if samples is None:
            samples = [(place, offset) for place in range(len(prompts)) for offset in range(plan.n)]
        first = plan.index_offset
        return [self._make_request(prompts[at], plan, first + at, step, nth) for at, nth in samples]

    def _make_request(
        self, prompt: Prompt, plan: SamplingPlan, place: int, step: int, offset: int
    ) -> AsyncRolloutRequest:
        uid = f"{plan.name}-{step}-{prompt.index}-{place}"
        return AsyncRolloutRequest.from_prompt(
            prompt,
            request_id=f"{uid}-{offset}",
            batch_data_id=place,
            rollout_offset=offset,
            uid=uid,
            sampling=plan.sampling,
            budgets=self.budgets,
            seed=draw_seed(f"{self._rollout.seed}:{uid}:{offset}"),
        )

    async def rollout(
        self,
        requests: Sequence[AsyncRolloutRequest],
        *,
        on_finished: Callable[[AsyncRolloutRequest], None] | None = None,
    ) -> list[AsyncRolloutRequest]:
        """Drive all requests to their ends and do what is declared for those that failed.

        Raises:
            RolloutError: see `apply_failure_policy`.
            Exception: see `drive`.
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
        """Drive all requests to their ends; the result has their order.

        Meanwhile the garbage collector of the process searches rarely (`rare_gc`).

        A failed request costs itself alone. Under `retry` the result holds the last attempt of
        each. Cancelling ends every request as ABORTED and releases its plug-ins before the
        cancellation goes on.

        Args:
            requests: Pending requests.
            on_finished: Told of each request when it has ended for good; for a progress bar.

        Raises:
            TransitionError: for a request that is not pending.
            RolloutError: in deterministic mode, while another such rollout uses the engine.
            Exception: what `on_finished` raised. It ends the rollout; where several come at
                once, they come in an `ExceptionGroup`.
        """
        try:
            return await self._drive_all(requests, on_finished or _tell_nobody)
        except BaseExceptionGroup as group:
            failure = group.exceptions[0] if len(group.exceptions) == 1 else group
        finally:
            end_waiting(requests)
        raise failure

    async def _drive_all(
        self,
        requests: Sequence[AsyncRolloutRequest],
        on_finished: Callable[[AsyncRolloutRequest], None],
    ) -> list[AsyncRolloutRequest]:
        entry = self._open_entry(len(requests))

        async def drive(
            place: int, request: AsyncRolloutRequest, admission: Scheduler
        ) -> AsyncRolloutRequest:
            async with admission.admit(place) as source:
                done = await self._attempt(request, source)
            on_finished(done)
            return done

        # A tool that blocks the event loop holds up everybody: it is named while it does.
        with LoopWatchdog(), rare_gc():
            async with entry as admission, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(drive(place, request, admission))
                    for place, request in enumerate(requests)
                ]
        return [task.result() for task in tasks]

    def _open_entry(self, num_requests: int) -> AbstractAsyncContextManager[Scheduler]:
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
        done = await run_request(request, self.context, source)
        while can_be_retried(done) and done.attempt < retries:
            fresh = next_attempt(fresh)
            done = await run_request(fresh.model_copy(deep=True), self.context, source)
        return done

    def apply_failure_policy(
        self, finished: Sequence[AsyncRolloutRequest], summary: FailureSummary | None = None
    ) -> None:
        """Do what is declared for failed requests; again after scoring, which may fail some too.

        Args:
            finished: Requests that have ended.
            summary: Of the whole batch, where other ranks have parts of it; None: of `finished`.

        Raises:
            RolloutError: under `failure.policy: raise`, or where more than `max_failed_frac` of
                the batch failed, or more than `max_failed_calls_frac` of the calls of a tool.
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


def _tell_nobody(_: AsyncRolloutRequest) -> None:
    """Nobody waits for the end of a request."""


def end_waiting(requests: Sequence[AsyncRolloutRequest]) -> None:
    """End requests whose turn never came, because the rollout was cancelled before."""
    for request in requests:
        if not request.is_finished:
            why = Failure(fault=Fault.LIMIT, kind="CancelledError", message="not begun", turn=0)
            request.finish(StopReason.ABORTED, why)


def can_be_retried(request: AsyncRolloutRequest) -> bool:
    """Whether a request failed by accident; what was aborted was so on purpose."""
    return request.state is RequestState.FAILED and request.stop_reason is not StopReason.ABORTED


def next_attempt(request: AsyncRolloutRequest) -> AsyncRolloutRequest:
    """Make a fresh request for the same sample: a new request_id, the same uid."""
    attempt = request.attempt + 1
    root = request.request_id.removesuffix(f"~{request.attempt}")
    return request.model_copy(
        deep=True, update={"attempt": attempt, "request_id": f"{root}~{attempt}"}
    )


def make_budgets(rollout: RolloutConfig, data: DataConfig, engine_len: int) -> Budgets:
    """Gather what one request may use from the configuration and the engine's length."""
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
