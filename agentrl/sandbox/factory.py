"""Choose a sandbox provider: the best that works on this machine, or an error if none does."""

import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import AgentRLError, MissingExtraError, SandboxError
from agentrl.plugins.call import PerLoop
from agentrl.plugins.environment import install_command
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.fusion import FusionSandbox
from agentrl.sandbox.inside import attacks
from agentrl.sandbox.inside.frames import pack_frame, read_frame
from agentrl.sandbox.local import LocalSandbox
from agentrl.sandbox.spawner_client import (
    AgentAccess,
    LocalProvider,
    Sockets,
    SpawnerClient,
    sandlock_folder,
)

logger = logging.getLogger(__name__)

_TRIAL_S = 30
_ATTACKS = Path(attacks.__file__)
_OUTSIDE = "/var/tmp"
"""A folder that no sandbox replaces by its own."""
_TRIAL_LIMITS = SandboxConfig(
    max_processes=4, max_open_files=32, disk_bytes=2 * 1024**2, memory_bytes=128 * 1024**2
)
ISOLATING_PROVIDERS: tuple[LocalProvider, ...] = ("sandlock", "bubblewrap")
"""Providers that isolate code on this machine, the best first."""


def make_sandbox(config: SandboxConfig, access: AgentAccess | None = None) -> Sandbox:
    """Make the sandbox that a configuration asks for.

    The provider is tried once per process: a program tries the attacks of `inside/attacks.py`, and
    none may succeed.

    Args:
        config: The sandbox's keys.
        access: What an agent reaches; None for other code.

    Raises:
        MissingExtraError: If the provider that is asked for is not installed.
        SandboxError: If no provider that is asked for can isolate code on this machine.
    """
    if config.provider == "sandbox_fusion":
        return FusionSandbox(config)
    if config.provider == "subprocess":
        if not config.trusted:
            raise SandboxError(
                "provider: subprocess sets limits and keeps nothing secret: code could read and "
                "delete whatever this user can",
                provider="subprocess",
                expected="trusted: true, if you trust the code; else sandlock "
                f"({install_command('sandbox')}) or bubblewrap from the system's packages",
            )
        return LocalSandbox(config, "subprocess")
    wanted = ISOLATING_PROVIDERS if config.provider == "auto" else (config.provider,)
    return LocalSandbox(config, _first_usable(wanted, access), access)


def _first_usable(wanted: Sequence[LocalProvider], access: AgentAccess | None) -> LocalProvider:
    reasons: dict[str, str] = {}
    for provider in wanted:
        reason = unavailable_reason(provider, access=access)
        if reason is None:
            return provider
        if wanted == ("sandlock",):
            missing, reason = reason, unavailable_reason(provider, is_asked_for=True)
            if reason is None:
                logger.warning("sandlock stops less here, see docs/trust.md: %s", missing)
                return provider
        reasons[provider] = reason
    install = install_command("sandbox")
    if wanted == ("sandlock",) and sandlock_folder() is None:
        raise MissingExtraError("sandlock is not installed", install=install)
    raise SandboxError(
        "no sandbox provider on this machine can isolate code that a model wrote",
        **reasons,
        expected=f"{install}, or the system's package bubblewrap; without namespaces: provider: "
        "sandlock, or sandbox_fusion with a url (docs/trust.md)",
    )


@cache
def unavailable_reason(
    provider: LocalProvider, *, is_asked_for: bool = False, access: AgentAccess | None = None
) -> str | None:
    """Return why a provider cannot isolate code here; None if a trial run has shown that it can.

    It never raises: if one provider is broken, the next may work.

    Args:
        provider: The provider.
        is_asked_for: Whether the configuration names it; sandlock may then lack namespaces.
        access: What an agent reaches; None for other code.
    """
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if provider == "sandlock" and sandlock_folder() is None:
        return "it is not installed"
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        return "it is not installed"
    limits = _TRIAL_LIMITS.model_copy(update={"provider": provider if is_asked_for else "auto"})
    spawner = SpawnerClient(limits, provider, access)
    try:
        return _try_out(spawner, limits)
    except SandboxError as error:
        return str(error.args[0])
    except Exception as error:  # noqa: BLE001 - a provider's installation may be broken in any way
        return f"{type(error).__name__}: {error}"
    finally:
        spawner.close_now()


def _try_out(spawner: SpawnerClient, limits: SandboxConfig) -> str | None:
    """Try the attacks of `inside/attacks.py`; return why the provider cannot be used, or None."""
    sockets = spawner.start_sandbox()
    with (
        sockets.guest,
        sockets.control,
        tempfile.NamedTemporaryFile(
            dir=_OUTSIDE if os.access(_OUTSIDE, os.W_OK) else None
        ) as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TRIAL_S, 0))
        os.chmod(secret.name, 0o666)
        outside = {
            "secret": secret.name,
            "pid": os.getpid(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "port": server.getsockname()[1],
        }
        target = {**limits.model_dump(), **outside}
        source = f"{_ATTACKS.read_text()}\nprint('reached:', find_breaches({target!r}))"
        bounds = {"timeout_s": _TRIAL_S, "max_output_bytes": 4096}
        answer: dict[str, Any] | None = None
        try:
            if read_frame(sockets.guest.fileno()) is not None:
                sockets.guest.sendall(pack_frame({"op": "python", "source": source, **bounds}))
                answer = read_frame(sockets.guest.fileno())
            error = "its guest ended"
        except (OSError, ValueError) as raised:
            error = str(raised)
        if answer is None:
            return _last_error(sockets) or spawner.last_error() or error
        is_isolated = answer.get("stdout") == "reached: []\n"
        return None if is_isolated else f"it does not isolate code: {answer}"


def _last_error(sockets: Sockets) -> str:
    try:
        sockets.control.shutdown(socket.SHUT_WR)
        return sockets.control.recv(4096).decode(errors="replace").strip()
    except OSError:
        return ""


class SharedSandbox:
    """The sandbox of a plug-in. The plug-in is built before there is an event loop.

    A run has one event loop and therefore one sandbox. Each further loop, as in tests, gets its
    own.

    Args:
        config: The sandbox's keys.
        make: Makes the sandbox; None for `make_sandbox`. Tests pass their own.
    """

    def __init__(
        self, config: SandboxConfig, make: Callable[[SandboxConfig], Sandbox] | None = None
    ) -> None:
        self.config = config
        self._sandboxes = PerLoop(partial(make or make_sandbox, config))

    def get(self) -> Sandbox:
        """Return the running loop's sandbox; the first call makes it.

        Raises:
            SandboxError: If no provider is available.
            MissingExtraError: If the provider that is asked for is not installed.
        """
        return self._sandboxes.get()

    async def close(self) -> None:
        """Close the running loop's sandbox. May be called twice."""
        if (sandbox := self._sandboxes.pop()) is not None:
            await sandbox.close()


def check_sandbox(config: SandboxConfig, *, key: str, access: AgentAccess | None = None) -> None:
    """Find the provider, so that a run without one fails before it starts.

    Args:
        config: The sandbox's keys.
        key: The key of this section, for the error.
        access: What an agent reaches; None for other code.

    Raises:
        SandboxError: If none is available; it says what to install.
        MissingExtraError: If the provider that is asked for is not installed.
        ConfigError: If a key that this provider needs is missing.
    """
    try:
        make_sandbox(config, access)
    except AgentRLError as error:
        inner = error.details.get("key")
        error.details["key"] = f"{key}.{inner}" if inner else key
        raise


def warn_of_unused_keys(config: SandboxConfig, *, key: str) -> None:
    """Warn of keys of a plug-in's sandbox that are set and have no effect."""
    for name, reason in config.find_unread().items():
        logger.warning("%s.%s has no effect: %s", key, name, reason)
