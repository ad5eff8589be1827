"""Run an agent that the user brings, as a program or as a function, against a gateway session.

The agent speaks to the policy by HTTP and knows nothing of agentrl. For each request it gets a base
URL, a key that names the request, and the row without its ground truth. The gateway builds the
request; this module starts the agent, bounds it, ends everything that it started, and decides how
the request ends: see `ExternalAgent`.
"""

import asyncio
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from agentrl.agent_loops.gateway import Gateway, GatewaySession
from agentrl.agent_loops.gateway.sessions import MAX_REWARD
from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.secrets import is_secret_name
from agentrl.engines.protocol import CompletionSource
from agentrl.errors import AgentError, AgentRLError, ConfigError, Fault, PluginError, text_of
from agentrl.messages import Message
from agentrl.plugins.call import CallTimeoutError, call_bounded, call_method, traceback_of
from agentrl.plugins.cancellation import is_cancelled
from agentrl.plugins.loading import load_object
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure, find_fault
from agentrl.rollout.records import AgentRun
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.sandbox.base import Execution, ExecutionEnd
from agentrl.sandbox.factory import SharedSandbox, check_sandbox

ROW_FILE = "row.json"
_ISOLATED = Path(__file__).with_name("isolated.py")
_MAX_KEPT_CHARS = 4000
_UNLIMITED = 1 << 48
_NOT_INHERITED = (
    *("HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of the trainer that would lead an agent to the trainer's folders or process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """What one call of an agent gets.

    Example:
        >>> async def solve(record):
        ...     client = AsyncOpenAI(**record.openai)
        ...     await client.chat.completions.create(
        ...         model=record.model, messages=record.row["prompt"])
    """

    base_url: str
    """Root of the OpenAI dialects, with `/v1`."""
    key: str
    """API key. It names the request."""
    row: dict[str, Any]
    """`prompt` (messages), `data_source`, `extra_info`, and the other columns of the row, without
    the ground truth."""
    model: str
    """Name of the policy. The gateway accepts every name."""
    request_id: str
    environment: dict[str, str]
    """Variables by which clients find the gateway; programs get them."""

    @property
    def anthropic_base_url(self) -> str:
        """Root of the Anthropic dialect, without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.anthropic_base_url, "api_key": self.key}

    def fill(self, argument: str) -> str:
        """Replace the placeholders of an argument. Other braces stay."""
        values = {
            "base_url": self.base_url,
            "anthropic_base_url": self.anthropic_base_url,
            "key": self.key,
            "model": self.model,
            "row": ROW_FILE,
            "request_id": self.request_id,
        }
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", value)
        return argument


@dataclass(slots=True)
class _Outcome:
    """How a call of the agent ended."""

    run: AgentRun
    reward: float | None = None
    error: AgentRLError | None = None
    """None if the agent ended by itself, without an error."""
    is_late: bool = False


RunAgent = Callable[[AgentRecord, float], Awaitable[_Outcome]]
"""Runs an agent for at most so many seconds. Raises nothing but cancellations."""


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
            command = _calling(str(config.python))
            self._run = AgentProgram(config, command, gateway, prints_reward=False)
        else:
            self._run = AgentFunction(str(config.python), _load_function(config))

    async def __call__(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive a pending request to its end. Raises nothing but a cancellation of its caller."""
        started = time.monotonic()
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
            outcome = await self._run(_make_record(session, request.request_id, row), timeout_s)
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

    def _find_error(self, request: AsyncRolloutRequest, outcome: _Outcome) -> AgentRLError | None:
        """Return the error of the agent that fails a request which met no limit."""
        if not request.num_prompt_tokens:
            return outcome.error or AgentError(
                "the agent ended without a completion of the policy",
                output=_shorten(outcome.run.stderr, 400) or None,
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


def _make_record(session: GatewaySession, request_id: str, row: dict[str, Any]) -> AgentRecord:
    environment = {
        **session.environment,
        "AGENTRL_REQUEST_ID": request_id,
        **_exempt_loopback(os.environ),
    }
    return AgentRecord(
        base_url=session.base_url,
        key=session.key,
        row=row,
        model=environment["AGENTRL_MODEL"],
        request_id=request_id,
        environment=environment,
    )


def _exempt_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls of the gateway from a proxy, which cannot reach it."""
    given = ",".join(environment.get(name, "") for name in ("NO_PROXY", "no_proxy")).split(",")
    hosts = dict.fromkeys([*filter(None, map(str.strip, given)), "127.0.0.1", "localhost"])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def visible_row(request: AsyncRolloutRequest, hidden_keys: Sequence[str]) -> dict[str, Any]:
    """Return the row as an external agent sees it, as plain JSON values.

    Left out are the keys to hide, and texts and lists that are the ground truth. Numbers and the
    items of longer lists are not compared: an index or a choice may be equal by chance.

    Args:
        request: A pending request.
        hidden_keys: Keys to remove, at any depth.
    """
    hidden = {*hidden_keys, "tools_kwargs", "interaction_kwargs", "reward_model"}
    truth = request.ground_truth

    def is_secret(key: str, value: Any) -> bool:
        is_compared = isinstance(value, str | list) and bool(value)
        return key in hidden or (is_compared and value in (truth, [truth]))

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {str(k): cleaned(v) for k, v in items if not is_secret(str(k), v)}
        if isinstance(value, list | tuple):
            return [cleaned(one) for one in cast("list[Any]", value)]
        return value

    row = {
        **cleaned(request.columns),
        "prompt": [_plain_message(message) for message in request.messages],
        "data_source": request.data_source,
        "extra_info": cleaned(request.extra_info),
    }
    return cast("dict[str, Any]", json.loads(json.dumps(row, default=str)))


def _plain_message(message: Message) -> dict[str, Any]:
    return message.model_dump(mode="json", exclude_none=True)


class AgentProgram:
    """Runs a program for each request, in a folder and with processes of its own.

    Args:
        config: `rollout.agent`.
        command: The program and its arguments.
        gateway: The gateway, which an isolated program reaches by a socket.
        prints_reward: Whether a JSON line of its output can be its reward.

    Raises:
        ConfigError: If the program or a file does not exist.
        SandboxError: If the sandbox is not available.
    """

    def __init__(
        self,
        config: AgentConfig,
        command: list[str],
        gateway: Gateway,
        *,
        prints_reward: bool = True,
    ) -> None:
        self._prints_reward = prints_reward
        limits = config.sandbox or _NO_SANDBOX
        self._is_isolated = limits.provider == "bubblewrap"
        if self._is_isolated:
            check_sandbox(limits, key="rollout.agent.sandbox")
            limits = limits.model_copy(update={"provider": "subprocess", "trusted": True})
        self._gateway = gateway
        self._sandbox = SharedSandbox(limits)
        self._command = _absolute(command)
        self._readable = _readable(self._command)
        self._env = {**_inherited(), **config.env}
        self._files = {path.name: _read_file(path) for path in config.files}

    async def __call__(self, record: AgentRecord, timeout_s: float) -> _Outcome:
        """Run the program once."""
        row = json.dumps(record.row)
        command = [record.fill(argument) for argument in self._command]
        if self._is_isolated:
            path, port = await self._gateway.open_socket(), urlsplit(record.base_url).port
            command = [
                *(sys.executable, str(_ISOLATED), str(path), str(port)),
                *(*self._readable, "--", *command),
            ]
        try:
            execution = await self._sandbox.get().run_program(
                command,
                files={**self._files, ROW_FILE: row},
                stdin=row,
                env={**self._env, **record.environment, **_exempt_loopback(self._env)},
                timeout_s=timeout_s,
            )
        except AgentRLError as error:  # the sandbox failed
            return _Outcome(AgentRun(end="error", stderr=_shorten(text_of(error))), error=error)
        outcome = _Outcome(_record_execution(execution))
        try:
            outcome.reward = _find_reward(execution.stdout) if self._prints_reward else None
        except AgentError as error:
            outcome.error = error
        if not execution.is_ok:
            outcome.is_late = execution.end is ExecutionEnd.TIMEOUT
            outcome.error = _describe_end(execution, timeout_s)
        return outcome

    async def close(self) -> None:
        """Kill the programs that run. May be called twice."""
        await self._sandbox.close()


_NO_SANDBOX = SandboxConfig(
    provider="subprocess",
    trusted=True,
    cpu_s=1e9,
    memory_bytes=_UNLIMITED,
    disk_bytes=_UNLIMITED,
    max_open_files=4096,
    max_output_bytes=256 * 1024,
    num_warm=0,
)
"""The limits of a program without a sandbox: output, and a private folder."""


def _inherited() -> dict[str, str]:
    """Return the trainer's variables without those that `rollout.agent.env` must name: secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not is_secret_name(name)
    }


def _calling(path: str) -> list[str]:
    """Return the command that calls a function in a process."""
    script = str(Path(__file__).with_name("call_function.py"))
    module, colon, name = path.rpartition(":")
    if module.endswith(".py"):
        module = str(Path(module).expanduser().resolve())
    return [sys.executable, script, os.getcwd(), f"{module}{colon}{name}"]


def _absolute(command: list[str]) -> list[str]:
    """Make the program and the files among its arguments independent of the working folder.

    Raises:
        ConfigError: If the program does not exist.
    """
    program, *arguments = command
    found = sys.executable if program in ("python", "python3") else shutil.which(program)
    if found is None:
        raise ConfigError(
            f"the program {program!r} is not found",
            key="rollout.agent.command",
            expected="a program on PATH, or the path of one",
        )
    files = (str(Path(each).resolve()) if Path(each).is_file() else each for each in arguments)
    return [os.path.abspath(found), *files]


def _readable(command: Sequence[str]) -> list[str]:
    """List what an isolated command may read: its program and the files among its arguments.

    Of a program in a virtual environment, that is the environment and its Python.
    """
    program, *arguments = map(Path, command)
    readable = [one for one in arguments if one.is_file()]
    environment = program.parent.parent
    settings = environment / "pyvenv.cfg"
    if not settings.is_file():
        return [str(one) for one in (program, *readable)]
    named = [line.partition("=") for line in settings.read_text(encoding="utf-8").splitlines()]
    homes = [Path(value.strip()) for name, _, value in named if name.strip() == "home"]
    return [str(one) for one in (environment, *(home.parent for home in homes), *readable)]


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", key="rollout.agent.files", expected="a text file"
        ) from None


def _record_execution(execution: Execution) -> AgentRun:
    return AgentRun(
        end=execution.end.value,
        exit_code=execution.exit_code,
        seconds=execution.seconds,
        stdout=_shorten(execution.stdout),
        stderr=_shorten(execution.stderr),
        num_cut_bytes=execution.num_cut_bytes,
    )


def _describe_end(execution: Execution, timeout_s: float) -> AgentError:
    ends = {
        ExecutionEnd.TIMEOUT: f"it ran for more than {timeout_s:g} s",
        ExecutionEnd.CPU: "its CPU seconds were used up",
        ExecutionEnd.MEMORY: "it used more memory than it may",
        ExecutionEnd.KILLED: "it was killed",
        ExecutionEnd.ERROR: f"it ended with exit code {execution.exit_code}",
    }
    said = _shorten((execution.stderr or execution.stdout).strip(), 800)
    return AgentError(
        f"the agent's program failed: {ends[execution.end]}",
        exit_code=execution.exit_code,
        output=said or None,
    )


def _shorten(text: str, max_chars: int = _MAX_KEPT_CHARS) -> str:
    """Keep the start and the end of a text."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 4
    return (
        f"{text[:head]}\n[... {len(text) - max_chars} characters ...]\n{text[head - max_chars :]}"
    )


def _find_reward(stdout: str) -> float | None:
    """Return the reward of the last line that is a JSON object with the key `reward`.

    Raises:
        AgentError: If it is not a finite number.
    """
    for line in reversed(stdout.splitlines()):
        if not line.lstrip().startswith("{") or '"reward"' not in line:
            continue
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "reward" in found:
            return _check_reward(cast("dict[str, Any]", found)["reward"])
    return None


def _check_reward(value: Any) -> float | None:
    """Return a reward as a number.

    Raises:
        AgentError: If it is neither None nor a finite number.
    """
    if value is None:
        return None
    # A JSON integer can have more digits than a float can hold.
    with suppress(OverflowError):
        is_number = hasattr(value, "__float__") and not isinstance(value, bool)
        if is_number and abs(number := float(value)) < MAX_REWARD:
            return number
    raise AgentError(
        f"the agent reports the reward {_shorten(repr(value), 80)}", expected="a finite number"
    )


class AgentFunction:
    """Calls a function of the user for each request: `async def` on the loop, else on a thread.

    Args:
        path: Path of the function, for messages.
        function: It takes an `AgentRecord`, and returns None, a reward, or `{"reward": ...}`.
    """

    def __init__(self, path: str, function: Callable[[AgentRecord], Any]) -> None:
        self._path, self._function = path, function
        os.environ.update(_exempt_loopback(os.environ))

    async def __call__(self, record: AgentRecord, timeout_s: float) -> _Outcome:
        """Call the function once."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome = _Outcome(AgentRun(end="ok"))
        try:
            returned = await call_bounded(
                lambda: call_method(self._function, record),
                timeout_s=timeout_s,
                name=f"agent:{self._path}",
            )
            found = cast("Any", returned.get("reward") if isinstance(returned, dict) else returned)
            outcome.reward = _check_reward(found)
        except CallTimeoutError:
            outcome.run.end, outcome.is_late = "timeout", True
            outcome.error = AgentError(f"the agent {self._path} ran for more than {timeout_s:g} s")
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
    return cast("Callable[[AgentRecord], Any]", function)
