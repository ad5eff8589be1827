"""The trainer's end of a keeper: starts it, asks it for sandboxes, ends it."""

import asyncio
import importlib.util
import json
import math
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.syscall_filter import syscall_filter

LocalProvider = Literal["sandlock", "bubblewrap", "subprocess"]


_INSIDE = Path(__file__).with_name("inside").resolve()


KEEPER = _INSIDE / "spawner.py"


_MOST_TIMERS = 256
"""POSIX timers and queued signals of a user: the kernel's memory for them counts for no process."""


def keeper_settings(config: SandboxConfig, provider: LocalProvider) -> dict[str, object]:
    """Say all that a keeper needs to know.

    Raises:
        SandboxError: where the interpreter does not lie where Python says that it is installed, or
            the system calls of this machine are not known.
    """
    home, executable = _interpreter()
    packages = _site_packages() if config.site_packages else []
    return {
        "provider": provider,
        "folders": str(Path(tempfile.gettempdir()).resolve() / f"agentrl-sandbox-{_user()}-"),
        "environment": [str(home), str(_INSIDE), *packages],
        "executable": str(executable),
        "needs_namespaces": provider == "sandlock" and config.provider != "sandlock",
        "limits": _limits(config, provider),
        "memory_bytes": config.memory_bytes,
        "disk_bytes": config.disk_bytes,
        "max_processes": config.max_processes,
        "sandlock_folder": sandlock_folder(),
        "bubblewrap": shutil.which("bwrap"),
    }


def sandlock_folder() -> str | None:
    """Find where the package sandlock is installed, without importing it; None where it is not."""
    try:
        found = importlib.util.find_spec("sandlock")
    except (ImportError, ValueError):  # whoever finds modules here refuses this one
        return None
    return None if found is None or found.origin is None else str(Path(found.origin).parents[1])


def _interpreter() -> tuple[Path, Path]:
    home, executable = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    if not executable.is_relative_to(home):
        raise SandboxError(
            f"the interpreter {executable} does not lie in its own installation",
            expected=f"a path under {home}",
        )
    return home, executable.relative_to(home)


def _site_packages() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(str(Path(paths[name]).resolve()) for name in ("purelib", "platlib")))


def _user() -> int:
    return Path("/proc/self").stat().st_uid


def _limits(config: SandboxConfig, provider: LocalProvider) -> dict[str, object]:
    rlimits = {
        "RLIMIT_AS": config.memory_bytes,
        "RLIMIT_CPU": math.ceil(config.cpu_s),
        "RLIMIT_NOFILE": config.max_open_files,
        "RLIMIT_FSIZE": config.disk_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_SIGPENDING": _MOST_TIMERS,
    }
    return {
        "rlimits": rlimits,
        "is_alone": provider != "subprocess",
        "syscall_filter": None if provider == "subprocess" else syscall_filter().hex(),
    }


_END_WAIT_S, _DEATH_WAIT_S = 10.0, 0.2


class Sockets(NamedTuple):
    """Two sockets of one sandbox."""

    talk: socket.socket
    """The guest's: requests and answers."""
    control: socket.socket
    """The warden's: shutting it down kills all; it ends when all is cleared away."""


class SpawnerClient:
    """Starts sandboxes by a process of its own, which is started when it is first needed.

    Args:
        config: The sandbox's.
        provider: Who keeps the code in.
    """

    def __init__(self, config: SandboxConfig, provider: LocalProvider) -> None:
        self._config = config
        self.provider: LocalProvider = provider
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._is_closed = False

    def start_sandbox(self) -> Sockets:
        """Ask for a sandbox; whether it starts is told on its sockets.

        Raises:
            SandboxError: where the keeper cannot start, twice, or was closed.
        """
        if self._is_closed:
            raise SandboxError("the sandbox is closed", provider=self.provider)
        try:
            return self._ask(self._asked or self._start())
        except OSError:  # it was killed: a new one takes its place
            self._forget()
        try:
            return self._ask(self._start())
        except OSError:
            raise SandboxError(
                f"the process that starts sandboxes died: {self.last_words()}",
                provider=self.provider,
            ) from None

    def _start(self) -> socket.socket:
        asked, far = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        told = json.dumps(keeper_settings(self._config, self.provider))
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", str(KEEPER), told],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={"HOME": "/"},  # for users without an entry in the password file
                cwd="/",
                start_new_session=True,
            )
        self._asked = asked
        return asked

    @staticmethod
    def _ask(asked: socket.socket) -> Sockets:
        talk, far_talk = socket.socketpair()
        control, far_control = socket.socketpair()
        with far_talk, far_control:
            try:
                socket.send_fds(asked, [b"+"], [far_talk.fileno(), far_control.fileno()])
            except OSError:
                talk.close()
                control.close()
                raise
        return Sockets(talk, control)

    async def has_died(self) -> bool:
        """Whether it ended by itself, or was killed."""
        process = self._process
        if process is None:
            return False
        try:
            await asyncio.to_thread(process.wait, _DEATH_WAIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """Say what the keeper wrote when it broke."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace").strip().rpartition("\n")[2]

    def _forget(self) -> None:
        if self._asked is not None:
            self._asked.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._asked = self._process = self._errors = None

    def close_now(self) -> None:
        """End it, with all that it started, and wait for that. No other takes its place."""
        self._is_closed = True
        process, self._process = self._process, None
        asked, self._asked = self._asked, None
        if asked is not None:
            with suppress(OSError):
                asked.shutdown(socket.SHUT_RDWR)
            asked.close()
        if process is not None:
            try:
                process.wait(_END_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    async def close(self) -> None:
        """End it as `close_now` does, off the event loop."""
        self._is_closed = True  # before anybody else runs here
        await asyncio.to_thread(self.close_now)
