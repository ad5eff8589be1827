"""Drive a request with an agent loop: run it within its limits, check and record what it returns.

`AgentLoopRunner` is the error boundary around a loop. It always returns a request that has ended,
and a failure is recorded on it (a failed request is data).
"""

import asyncio
import copy
import inspect
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import Any

from agentrl.agent_loops.base import AgentLoopBase, DictConfigWrap, ToolListWrap
from agentrl.agent_loops.output import AgentLoopOutput
from agentrl.agent_loops.reconcile import read_outputs
from agentrl.agent_loops.recording import (
    check_outputs,
    record_partial,
    record_results,
    record_sequences,
)
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.server_manager import AsyncLLMServerManager
from agentrl.agent_loops.views import config_view, tokenizer_view, tool_view
from agentrl.config.schema.run import RunConfig
from agentrl.engines.protocol import CompletionSource, FinishReason
from agentrl.errors import AgentError, EngineError, Fault, TransitionError
from agentrl.messages import Message
from agentrl.plugins.call import CallTimeoutError, accepted_keywords, call_bounded
from agentrl.plugins.cancellation import is_cancelled
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.records import unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import EngineAbortError
from agentrl.rollout.states import RequestState, StopReason

NO_TIMEOUT_S = 1e9
"""Time-out of a loop if `rollout.request_timeout_s` is null; its idle time is limited anyway."""


class AgentLoopRunner:
    """Drives requests with the agent loops of one class; a `RunRequest`.

    Args:
        entry: The loop's class and its arguments.
        config: The run.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, entry: LoopEntry, config: RunConfig, tokenizer: Any) -> None:
        self._entry = entry
        self._config = config
        self._tokenizer = tokenizer
        self._shared: dict[str, Any] | None = None

    async def __call__(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive a pending request to its end.

        Raises:
            TransitionError: If the request is not pending.
            asyncio.CancelledError: If the caller cancels. The request has ended then.
        """
        if request.state is not RequestState.PENDING:
            state = request.state
            raise TransitionError(f"the request {request.request_id} is {state}, not pending")
        started = time.monotonic()
        request.metrics["seconds_started"] = unix_time(started)
        request.take_edge(RequestState.RUNNING)
        manager = AsyncLLMServerManager(
            request,
            source,
            template=context.template,
            media=context.media,
            vocab_size=len(self._tokenizer),
            max_calls=self._config.rollout.agent.max_loop_calls,
            is_serial=self._config.rollout.deterministic,
        )
        try:
            await context.media.load_prompt(request)
            outputs = await self._run(request, context, manager)
            sequences = await check_outputs(outputs, manager)
            record_sequences(request, context, sequences)
            record_results(request, outputs, sequences, manager)
            request.finish(find_end(request, manager))
        except asyncio.CancelledError as error:
            fail(request, context, manager, error)
            if is_cancelled():
                raise
        except Exception as error:  # noqa: BLE001 - the boundary: a failed request is data
            fail(request, context, manager, error)
        finally:
            await manager.close()
            request.metrics["seconds"] = time.monotonic() - started
        return request

    async def _run(
        self, request: AsyncRolloutRequest, context: RolloutContext, manager: AsyncLLMServerManager
    ) -> list[AgentLoopOutput]:
        """Run the loop in a task of its own, within its limits of time and calls."""

        async def run() -> list[AgentLoopOutput]:
            loop = self._entry.build(self._offer(context) | {"server_manager": manager})
            vars(loop).setdefault("interactions", context.interactions)
            return read_outputs(await _call_run(loop, sampling_params(request), make_row(request)))

        name, idle_s = f"agent loop {self._entry.name}", self._config.rollout.agent.loop_timeout_s
        timeout_s = request.budgets.timeout_s or NO_TIMEOUT_S
        bounded = asyncio.create_task(call_bounded(run, timeout_s=timeout_s, name=name))
        watch = asyncio.create_task(_end_at_limit(bounded, manager, idle_s))
        try:
            outputs = await bounded
            manager.raise_over_limit()  # the loop may have caught the error of its call
            if manager.engine_error is not None:
                raise manager.engine_error
            return outputs
        except asyncio.CancelledError as error:
            if is_cancelled() or not watch.done():
                raise
            manager.raise_over_limit()
            raise AgentError(
                f"the {name} neither returned nor called generate for {idle_s:g} s",
                key="rollout.agent.loop_timeout_s",
                expected="a loop that limits the time of its tools and of its environment",
            ) from error
        finally:
            watch.cancel()

    def _offer(self, context: RolloutContext) -> dict[str, Any]:
        """Return the arguments of every loop's constructor."""
        if self._shared is None:
            view = config_view(self._config, parser=context.parser)
            custom = self._config.model.custom_chat_template is not None
            source = context.template.structure.renderer.source if custom else None
            media = context.media.processor
            self._shared = {
                "trainer_config": DictConfigWrap(view),
                "tokenizer": tokenizer_view(self._tokenizer, chat_template=source),
                "processor": None if media is None else media.processor,
                "dataset_cls": None,
                "data_config": DictConfigWrap(view.data),
                "dataset_config": view.data,
                "hf_model_type": None,
                "tools": ToolListWrap([tool_view(tool) for tool in context.tools]),
                "interactions": dict(context.interactions),
            }
        return self._shared


def _call_run(loop: AgentLoopBase, sampling: dict[str, Any], row: dict[str, Any]) -> Awaitable[Any]:
    """Call `run` of a loop.

    Raises:
        AgentError: If it does not take the row, or is no `async def`.
    """
    name = f"{type(loop).__name__}.run"
    try:
        returned: Any = loop.run(sampling, **accepted_keywords(loop.run, row))
    except TypeError as error:  # a coroutine function only binds its arguments here
        raise AgentError(
            f"{name} cannot be called with the row: {error}",
            row=", ".join(sorted(row)),
            expected="async def run(self, sampling_params, **row)",
        ) from error
    if not inspect.isawaitable(returned):
        raise AgentError(
            f"{name} is no `async def`: it returned a {type(returned).__name__}",
            expected="async def run(self, sampling_params, **row)",
        )
    return returned


async def _end_at_limit(
    task: "asyncio.Task[Any]", manager: AsyncLLMServerManager, idle_s: float
) -> None:
    """Cancel a loop that does nothing with the policy for too long, or calls it too often."""
    while (left_s := idle_s - manager.idle_s) > 0 and not manager.is_over_limit.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await manager.is_over_limit.wait()
    task.cancel()


def sampling_params(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Return the sampling parameters of a request under verl's names."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def make_row(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Return the row of a request as loops get it: copies, which a loop may change."""
    columns = {name: value for name, value in request.columns.items() if name != "agent_name"}
    row = copy.deepcopy(
        columns
        | {
            "data_source": request.data_source,
            "reward_model": {"style": "rule", "ground_truth": request.ground_truth},
            "extra_info": request.extra_info,
            "tools_kwargs": request.tools_kwargs,
            "interaction_kwargs": request.interaction_kwargs,
            "index": request.extra_info.get("index", request.batch_data_id),
            "uid": request.uid,
        }
    )
    # The samples of a group share their images.
    row["raw_prompt"] = [_with_media(message) for message in request.messages]
    if request.multi_modal_data:
        row["multi_modal_data"] = {kind: [*of] for kind, of in request.multi_modal_data.items()}
    return row


def _with_media(message: Message) -> dict[str, Any]:
    """Return a message as a dict, with the image or video of each part under the part's type."""
    written = copy.deepcopy(message.to_template())
    for part, own in zip(message.parts, written["content"] if message.parts else (), strict=True):
        if part.item is not None:
            own[part.type] = part.item.loaded.data
    return written


def find_end(request: AsyncRolloutRequest, manager: AsyncLLMServerManager) -> StopReason:
    """Return why a loop's request ended: by a limit, a placeholder, or because the loop returned.

    Raises:
        EngineAbortError: If the run aborted a call of the loop.
    """
    turns = [turn for turn in request.trajectory_turns if turn.role == "assistant"]
    if any(turn.finish_reason is FinishReason.ABORT for turn in turns):
        raise EngineAbortError("the engine aborted the call")
    last = turns[-1]
    is_out_of_tokens = last.cut in ("response", "model") or manager.num_calls_after_budget > 0
    if is_out_of_tokens:
        return request.nearest_limit
    own = request.response_ids[last.start : last.end]
    if manager.num_calls_after_placeholder or manager.media.is_placeholder(own):
        return StopReason.SAMPLED_PLACEHOLDER
    return StopReason.ANSWERED


def fail(
    request: AsyncRolloutRequest,
    context: RolloutContext,
    manager: AsyncLLMServerManager,
    error: BaseException,
) -> None:
    """End a request as failed, with the tokens that were sampled."""
    with suppress(Exception):  # the record of a failure must not fail
        record_partial(request, context, manager)
    reason, fault = StopReason.FAILED, Fault.AGENT
    if isinstance(error, CallTimeoutError):
        reason, fault = StopReason.WALL_CLOCK, Fault.LIMIT
    elif isinstance(error, EngineAbortError) or is_cancelled():
        reason, fault = StopReason.ABORTED, Fault.LIMIT
    elif any(isinstance(cause, EngineError) for cause in _causes(error)):
        fault = Fault.ENGINE
    request.finish(reason, describe_failure(error, fault, turn=len(request.turns)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Walk an exception and those that led to it, members of groups included."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
