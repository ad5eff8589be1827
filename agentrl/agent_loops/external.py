"""Run an agent that the user brings, as a program or as a function, against a gateway session.

The agent speaks to the policy by HTTP and knows nothing of agentrl. For each request it gets a base
URL, a key that names the request, and the row without its ground truth. The gateway builds the
request; this module starts the agent, bounds it, ends everything that it started, and decides how
the request ends: see `ExternalAgent`.
"""

import asyncio
import inspect
import math
import os
import time
from collections.abc import Callable
from typing import Any, cast

from agentrl.agent_loops.agent_program import (
    IN_TIME,
    AgentProgram,
    call_in_process,
    check_command,
)
from agentrl.agent_loops.agent_record import (
    AgentRecord,
    Outcome,
    RunAgent,
    check_reward,
    exempt_loopback,
    make_record,
    shorten,
    visible_row,
)
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.engines.protocol import CompletionSource
from agentrl.errors import AgentError, AgentRLError, ConfigError, Fault, PluginError, text_of
from agentrl.plugins.call import CallTimeoutError, call_bounded, call_method, traceback_of
from agentrl.plugins.cancellation import is_cancelled
from agentrl.plugins.loading import load_object
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure, find_fault
from agentrl.rollout.records import AgentRun, unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason


class ExternalAgent:
    """Drives each request by an external agent; a `RunRequest`.

    The end of the request:

    - The gateway met a limit, or the engine failed: the request ends so, whatever the agent made of
      the error that it got.
    - The agent ended by itself: ANSWERED.
    - It crashed (an exception, another exit code than 0, a signal), flooded its output, reported a
      reward that is no number, or made no call: FAILED with `Fault.AGENT`.
    - It was late: WALL_CLOCK.

    With `on_failure: score` a crashed or late agent that has called the policy ends as ANSWERED.

    Args:
        config: `rollout.agent`.
        gateway: The gateway of the agents. `close` closes it.

    Raises:
        ConfigError: If the program, a file or the function does not exist.
    """

    def __init__(self, config: AgentConfig, gateway: Gateway) -> None:
        self._config = config
        self._gateway = gateway
        self._run: RunAgent
        if config.command is not None:
            self._run = AgentProgram(config, config.command, gateway)
        elif config.isolation == "process":
            _load_function(config)
            command = call_in_process(str(config.python))
            self._run = AgentProgram(config, command, gateway, prints_reward=False)
        else:
            self._run = AgentFunction(str(config.python), _load_function(config))

    async def __call__(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive a pending request to its end. Raises nothing but a cancellation of its caller."""
        started = time.monotonic()
        request.metrics["seconds_started"] = unix_time(started)
        try:
            await self._drive(request, context, source)
        except asyncio.CancelledError as error:
            _fail(request, StopReason.ABORTED if is_cancelled() else StopReason.FAILED, error)
            if is_cancelled():
                raise
        except Exception as error:  # noqa: BLE001 - the boundary: a failed request is data
            _fail(request, StopReason.FAILED, error)
        finally:
            request.metrics["seconds"] = time.monotonic() - started
            request.metrics["release_failures"] = 0.0
        return request

    async def _drive(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> None:
        row = visible_row(request, self._config.hidden_keys)
        timeout_s = min(self._config.timeout_s, request.budgets.timeout_s or math.inf)
        async with self._gateway.session(request, context, source) as session:
            outcome = await self._run(make_record(session, request.request_id, row), timeout_s)
        request.agent_run = outcome.run
        if outcome.reward is None:
            outcome.reward = session.reported_reward
        request.agent_reward = outcome.reward
        if session.error is not None:
            _fail(request, StopReason.FAILED, session.error)
        elif session.stop_reason is not StopReason.ANSWERED and request.num_prompt_tokens:
            request.finish(session.stop_reason)
        elif (error := self._find_error(request, outcome)) is not None:
            _fail(request, StopReason.WALL_CLOCK if outcome.is_late else StopReason.FAILED, error)
        else:
            request.finish(StopReason.ANSWERED)

    def _find_error(self, request: AsyncRolloutRequest, outcome: Outcome) -> AgentRLError | None:
        """Return the error of the agent that fails a request which met no limit."""
        if not request.num_prompt_tokens:
            return outcome.error or AgentError(
                "the agent ended without a completion of the policy",
                output=shorten(outcome.run.stderr, 400) or None,
                expected="a call of chat completions, responses or messages at its base URL, with "
                "a prompt that fits the context",
            )
        return None if self._config.on_failure == "score" else outcome.error

    async def close(self) -> None:
        """Kill the agents that run, and end what starts them. May be called twice."""
        if isinstance(self._run, AgentProgram):
            await self._run.close()
        await self._gateway.close()


def _fail(request: AsyncRolloutRequest, reason: StopReason, error: BaseException) -> None:
    if not request.is_finished:
        is_limit = reason is not StopReason.FAILED
        fault = Fault.LIMIT if is_limit else find_fault(error, request.state)
        request.finish(reason, describe_failure(error, fault, turn=len(request.turns)))


class AgentFunction:
    """Calls a function of the user for each request: `async def` on the loop, else on a thread.

    Args:
        path: Path of the function, for messages.
        function: It takes an `AgentRecord`, and returns None, a reward, or `{"reward": ...}`.
    """

    def __init__(self, path: str, function: Callable[[AgentRecord], Any]) -> None:
        self._path, self._function = path, function
        os.environ.update(exempt_loopback(os.environ))

    async def __call__(self, record: AgentRecord, timeout_s: float) -> Outcome:
        """Call the function once."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome = Outcome(AgentRun(end="ok"))
        try:
            returned = await call_bounded(
                lambda: call_method(self._function, record),
                timeout_s=timeout_s,
                name=f"agent:{self._path}",
            )
            found = cast("Any", returned.get("reward") if isinstance(returned, dict) else returned)
            outcome.reward = check_reward(found)
        except CallTimeoutError:
            outcome.run.end, outcome.is_late = "timeout", True
            outcome.error = AgentError(
                f"the agent {self._path} ran for more than {timeout_s:g} s", expected=IN_TIME
            )
        except Exception as error:  # noqa: BLE001 - the boundary around users' code
            outcome.run.end = "error"
            outcome.run.stderr = traceback_of(error)
            outcome.error = AgentError(
                f"the agent {self._path} raised {type(error).__name__}: {text_of(error)}"
            )
        outcome.run.seconds = loop.time() - started
        return outcome


def _load_function(config: AgentConfig) -> Callable[[AgentRecord], Any]:
    try:
        function = load_object(str(config.python))
    except PluginError as error:
        error.details["key"] = "rollout.agent.python"
        raise
    if not callable(function):
        raise ConfigError(
            f"{config.python!r} is {type(function).__name__}",
            key="rollout.agent.python",
            expected="a function that takes an AgentRecord",
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{config.python!r} cannot be called with one argument: {error}",
            key="rollout.agent.python",
            expected="a function that takes an AgentRecord",
        ) from None
    except ValueError:  # some callables written in C have no signature
        pass
    return cast("Callable[[AgentRecord], Any]", function)


def check_external(config: AgentConfig, *, runs_here: bool = True) -> None:
    """Check that an external agent exists, without starting anything.

    Args:
        config: `rollout.agent`.
        runs_here: Whether its program runs on this machine; if not, only a function is checked.

    Raises:
        ConfigError: If the program, one of its files or the function does not exist.
        PluginError: If the module of the function cannot be imported.
    """
    if config.python is not None:
        _load_function(config)
    elif config.command is not None and runs_here:
        check_command(config, config.command)
