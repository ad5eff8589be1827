"""The trainer's side of a spawner: start it, ask it for sandboxes, end it."""

import asyncio
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.syscall_filter import IP_FAMILIES, syscall_filter

LocalProvider = Literal["sandlock", "bubblewrap", "subprocess"]
_INSIDE = Path(__file__).with_name("inside").resolve()
SPAWNER = _INSIDE / "spawner.py"
_GATEWAY = "/run/gateway.sock"
"""The path of the gateway's socket in an agent's sandbox."""
_END_WAIT_S, _DEATH_WAIT_S = 10.0, 0.2
_MAX_TIMERS = 256
"""POSIX timers and queued signals of a user. Their memory in the kernel counts for no process."""


@dataclass(frozen=True)
class AgentAccess:
    """What an agent reaches in a sandbox, in addition to what all code does."""

    readable: tuple[str, ...] = ()
    """Files and folders, at their own paths."""
    gateway: str | None = None
    """The gateway's Unix socket; None in a trial run."""
    port: int = 0
    """The port of 127.0.0.1 at which the agent finds the gateway."""


class Sockets(NamedTuple):
    """The two sockets of one sandbox."""

    guest: socket.socket
    """Requests to the guest, and its answers."""
    control: socket.socket
    """The supervisor's: shut it down to kill the sandbox; it ends when everything is removed."""


class SpawnerClient:
    """Starts sandboxes through a spawner process, which starts with the first sandbox.

    Args:
        config: The sandbox's keys.
        provider: The provider of the sandboxes.
        access: What an agent reaches; None for other code.
    """

    def __init__(
        self, config: SandboxConfig, provider: LocalProvider, access: AgentAccess | None = None
    ) -> None:
        self._config, self._access = config, access
        self.provider: LocalProvider = provider
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._is_closed = False

    def start_sandbox(self) -> Sockets:
        """Ask for a sandbox. Its sockets report whether it starts.

        Raises:
            SandboxError: If the client is closed, or the spawner cannot be started twice in a row.
        """
        if self._is_closed:
            raise SandboxError("the sandbox is closed", provider=self.provider)
        with suppress(OSError):  # the spawner was killed: start another one
            return self._request_sandbox(self._requests or self._start())
        self._end(wait_s=0)
        try:
            return self._request_sandbox(self._start())
        except OSError:
            raise SandboxError(
                f"the process that starts sandboxes died: {self.last_error()}",
                provider=self.provider,
            ) from None

    def _start(self) -> socket.socket:
        requests, far = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        settings = json.dumps(_spawner_settings(self._config, self.provider, self._access))
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", str(SPAWNER), settings],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={"HOME": "/"},  # for users without an entry in the password file
                cwd="/",
                start_new_session=True,
            )
        self._requests = requests
        return requests

    @staticmethod
    def _request_sandbox(requests: socket.socket) -> Sockets:
        guest, far_guest = socket.socketpair()
        control, far_control = socket.socketpair()
        with far_guest, far_control:
            try:
                socket.send_fds(requests, [b"+"], [far_guest.fileno(), far_control.fileno()])
            except OSError:
                guest.close()
                control.close()
                raise
        return Sockets(guest, control)

    async def has_died(self) -> bool:
        """Whether the spawner has ended by itself or was killed."""
        if self._process is None:
            return False
        try:
            await asyncio.to_thread(self._process.wait, _DEATH_WAIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_error(self) -> str:
        """Return the last line that the spawner wrote to its error output."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace").strip().rpartition("\n")[2]

    def _end(self, *, wait_s: float) -> None:
        """Close the spawner's socket, wait for its end, and kill it if it is late."""
        requests, self._requests = self._requests, None
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if requests is not None:
            with suppress(OSError):
                requests.shutdown(socket.SHUT_RDWR)
            requests.close()
        if process is not None:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if errors is not None:
            errors.close()

    def close_now(self) -> None:
        """End the spawner and everything that it started, and wait for that. It stays closed."""
        self._is_closed = True
        self._end(wait_s=_END_WAIT_S)

    async def close(self) -> None:
        """Do what `close_now` does, off the event loop."""
        self._is_closed = True  # before any other task runs
        await asyncio.to_thread(self.close_now)


def _spawner_settings(
    config: SandboxConfig, provider: LocalProvider, access: AgentAccess | None
) -> dict[str, object]:
    """Collect what a spawner needs: the limits, and what of this machine the code may see.

    Raises:
        SandboxError: If the interpreter is not inside its own installation, or the numbers of this
            machine's system calls are unknown.
    """
    home, executable = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    if not executable.is_relative_to(home):
        raise SandboxError(
            f"the interpreter {executable} is not inside its own installation",
            expected=f"a path under {home}",
        )
    paths = sysconfig.get_paths()
    names = ("purelib", "platlib") if config.site_packages else ()
    packages = dict.fromkeys(str(Path(paths[name]).resolve()) for name in names)
    temporary = Path(tempfile.gettempdir()).resolve()
    is_isolated = provider != "subprocess"
    families = () if access is None else IP_FAMILIES
    readable: dict[str, str] = {}
    relay: tuple[str, int] | None = None
    if access is not None:
        readable = {path: path for path in access.readable if os.path.exists(path)}
        if access.gateway is not None:
            readable[_GATEWAY] = access.gateway
            relay = (_GATEWAY, access.port)
    limits = {
        "rlimits": {
            "RLIMIT_AS": config.memory_bytes,
            "RLIMIT_CPU": math.ceil(config.cpu_s),
            "RLIMIT_NOFILE": config.max_open_files,
            "RLIMIT_FSIZE": config.disk_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_SIGPENDING": _MAX_TIMERS,
        },
        "is_isolated": is_isolated,
        "syscall_filter": syscall_filter(families=families).hex() if is_isolated else None,
        "relay": relay,
    }
    return {
        "provider": provider,
        "folders": str(temporary / f"agentrl-sandbox-{os.geteuid()}-"),
        "environment": [str(home), str(_INSIDE), *packages],
        "readable": readable,
        "executable": str(executable.relative_to(home)),
        "needs_namespaces": provider == "sandlock" and config.provider != "sandlock",
        "limits": limits,
        "memory_bytes": config.memory_bytes,
        "disk_bytes": config.disk_bytes,
        "max_processes": config.max_processes,
        "sandlock_folder": sandlock_folder(),
        "bubblewrap": shutil.which("bwrap"),
    }


def sandlock_folder() -> str | None:
    """Find the folder of the package sandlock without importing it; None if it is not installed."""
    try:
        found = importlib.util.find_spec("sandlock")
    except (ImportError, ValueError):  # a finder on this machine refuses the name
        return None
    return None if found is None or found.origin is None else str(Path(found.origin).parents[1])
