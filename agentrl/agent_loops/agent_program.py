"""Run a program of the user as the agent of a request."""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from agentrl.agent_loops.agent_record import (
    ROW_FILE,
    AgentRecord,
    Outcome,
    check_reward,
    exempt_loopback,
    shorten,
)
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.secrets import is_secret_name
from agentrl.errors import AgentError, AgentRLError, ConfigError, text_of
from agentrl.messages import dump_json
from agentrl.rollout.records import AgentRun
from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox
from agentrl.sandbox.factory import SharedSandbox, check_sandbox
from agentrl.sandbox.local import LocalSandbox
from agentrl.sandbox.spawner_client import AgentAccess

IN_TIME = "an agent that ends before rollout.agent.timeout_s and rollout.request_timeout_s"
_UNLIMITED = 1 << 48
_NOT_INHERITED = (
    *("HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of the trainer that would lead an agent to the trainer's folders or process group."""
_ISOLATED_INHERIT = ("PATH", "LANG", "LC_ALL", "TZ", "TERM")
"""The only variables of the trainer that an isolated agent gets."""
_SYSTEM_FILES = ("/etc/group", "/etc/passwd", "/etc/ssl/certs")
"""Files of the system that agents (git, clients of HTTP) expect, and other code does not see."""
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
        self._gateway = gateway
        self._command, self._files = check_command(config, command)
        inherited = _inherited()
        if self._is_isolated:
            self._access = AgentAccess(tuple(_readable(self._command)))
            check_sandbox(limits, key="rollout.agent.sandbox", access=self._access)
            inherited = {name: inherited[name] for name in _ISOLATED_INHERIT if name in inherited}
        self._sandbox = SharedSandbox(limits, self._make_isolated if self._is_isolated else None)
        self._env = {**inherited, **config.env}

    def _make_isolated(self, limits: SandboxConfig) -> Sandbox:
        return LocalSandbox(limits, "bubblewrap", self._access)

    async def __call__(self, record: AgentRecord, timeout_s: float) -> Outcome:
        """Run the program once."""
        row = dump_json(record.row, for_file=True)
        command = [record.fill(argument) for argument in self._command]
        if self._is_isolated:
            path, port = await self._gateway.open_socket(), urlsplit(record.base_url).port
            path.chmod(0o666)  # its folder is private, and the agent has a user of its own
            self._access = replace(self._access, gateway=str(path), port=port or 0)
        try:
            execution = await self._sandbox.get().run_program(
                command,
                files={**self._files, ROW_FILE: row},
                stdin=row,
                env={**self._env, **record.environment, **exempt_loopback(self._env)},
                timeout_s=timeout_s,
            )
        except AgentRLError as error:  # the sandbox failed
            return Outcome(AgentRun(end="error", stderr=shorten(text_of(error))), error=error)
        outcome = Outcome(_record_execution(execution))
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


def check_command(config: AgentConfig, command: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command with absolute paths, and the files of its folder by name.

    Raises:
        ConfigError: If the program, its script or a file does not exist.
    """
    files = {path.name: _read_file(path) for path in config.files}
    program, *arguments = command
    script = arguments[0] if arguments else ""
    is_script = script.endswith(".py") and re.fullmatch(r"python[\d.]*", Path(program).name)
    if is_script and not (Path(script).is_file() or script in files):
        raise ConfigError(
            f"no file {script}",
            key="rollout.agent.command",
            expected="an existing script, or the name of one of rollout.agent.files",
            **({} if Path(script).is_absolute() else {"looked_in": os.getcwd()}),
        )
    return _absolute(command), files


def call_in_process(path: str) -> list[str]:
    """Return the command that calls a function in a process."""
    script = str(Path(__file__).with_name("call_function.py"))
    module, colon, name = path.rpartition(":")
    if module.endswith(".py"):
        module = str(Path(module).expanduser().resolve())
    return [sys.executable, script, os.getcwd(), f"{module}{colon}{name}"]


def _inherited() -> dict[str, str]:
    """Return the trainer's variables without those that `rollout.agent.env` must name: secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not is_secret_name(name)
    }


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

    Raises:
        ConfigError: If root alone can read one of them.
    """
    program, *arguments = map(Path, command)
    readable = [*(Path(path) for path in _SYSTEM_FILES), *filter(Path.is_file, arguments)]
    environment = program.parent.parent
    settings = environment / "pyvenv.cfg"
    if settings.is_file():
        named = [line.partition("=") for line in settings.read_text(encoding="utf-8").splitlines()]
        homes = [Path(value.strip()) for name, _, value in named if name.strip() == "home"]
        readable = [environment, *(home.parent for home in homes), *readable]
    else:
        readable = [program, *readable]
    for one in readable:
        if os.geteuid() == 0 and one.exists() and not one.stat().st_mode & stat.S_IROTH:
            raise ConfigError(
                f"{one} can be read by its owner alone, and an isolated agent has its own user",
                key="rollout.agent.command",
                expected=f"a file that every user may read: chmod -R o+rX {one}",
            )
    return [str(one) for one in readable]


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
        stdout=shorten(execution.stdout),
        stderr=shorten(execution.stderr),
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
    is_late = execution.end is ExecutionEnd.TIMEOUT
    said = shorten((execution.stderr or execution.stdout).strip(), 800)
    return AgentError(
        f"the agent's program failed: {ends[execution.end]}",
        exit_code=execution.exit_code,
        output=said or None,
        expected=IN_TIME if is_late else None,
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
            return check_reward(cast("dict[str, Any]", found)["reward"])
    return None
