"""Which provider keeps the code in: the best that is present, and none rather than a poor one."""

import json
import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import AgentRLError, MissingExtraError, SandboxError
from agentrl.plugins.call import PerLoop
from agentrl.plugins.environment import install_command
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.local import LocalSandbox
from agentrl.sandbox.spawner_client import LocalProvider, Sockets, SpawnerClient, sandlock_folder

logger = logging.getLogger(__name__)

_CHECK_S = 30.0
_HEAD = struct.Struct(">I")
WALLS: tuple[LocalProvider, ...] = ("sandlock", "bubblewrap")
"""Providers that keep code in on this machine, the best first."""


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Make the sandbox that a configuration asks for.

    The provider is tried once in a process: a small program must run, and may neither read a file
    of this process nor send it a signal.

    Raises:
        MissingExtraError: where the one that is asked for is not installed.
        SandboxError: where none that is asked for can keep code in on this machine.
    """
    if config.provider == "sandbox_fusion":
        from agentrl.sandbox.fusion import FusionSandbox

        return FusionSandbox(config)
    if config.provider == "subprocess":
        return LocalSandbox(config, _trusted(config))
    asked = WALLS if config.provider == "auto" else (config.provider,)
    return LocalSandbox(config, _first_usable(asked))


def _first_usable(asked: Sequence[LocalProvider]) -> LocalProvider:
    reasons: dict[str, str] = {}
    for provider in asked:
        reason = why_not(provider)
        if reason is None:
            return provider
        if asked == ("sandlock",):
            missing, reason = reason, why_not(provider, is_asked_for=True)
            if reason is None:
                logger.warning("sandlock stops less here, see docs/trust.md: %s", missing)
                return provider
        reasons[provider] = reason
    if asked == ("sandlock",) and sandlock_folder() is None:
        raise MissingExtraError("sandlock is not installed", install=install_command("sandbox"))
    install = install_command("sandbox")
    raise SandboxError(
        "nothing on this machine keeps in the code that a model wrote",
        **reasons,
        expected=f"one of them: {install}, or bubblewrap from the system's packages; "
        "or provider: sandbox_fusion with a url; or, if no namespaces can be had, "
        "provider: sandlock, which then stops less (docs/trust.md)",
    )


def _trusted(config: SandboxConfig) -> LocalProvider:
    if config.trusted:
        return "subprocess"
    install = install_command("sandbox")
    raise SandboxError(
        "provider: subprocess sets limits and keeps nothing secret: code could read and delete "
        "whatever this user can",
        provider="subprocess",
        expected=f"trusted: true, where the code is trusted; else sandlock ({install}) or "
        "bubblewrap from the system's packages",
    )


@cache
def why_not(provider: LocalProvider, *, is_asked_for: bool = False) -> str | None:
    """Say why a provider cannot keep code in here; None: it can, as one run has shown.

    Raises nothing: whatever is broken about one provider, the next may be whole.

    Args:
        provider: The provider.
        is_asked_for: Whether the configuration names it; sandlock may then lack namespaces.
    """
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if provider == "sandlock" and sandlock_folder() is None:
        return f"it is not installed: {install_command('sandbox')}"
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        return "it is not installed: the package bubblewrap of the system brings bwrap"
    config = SandboxConfig(provider=provider if is_asked_for else "auto")
    keeper = SpawnerClient(config, provider)
    try:
        return _try_out(keeper)
    except SandboxError as error:
        return str(error.args[0])
    except Exception as error:  # noqa: BLE001 - a provider's installation may be broken in any way
        return f"{type(error).__name__}: {error}"
    finally:
        keeper.close_now()


_TRIAL = """
import os
def is_refused(work):
    try:
        work()
    except OSError:
        return True
print(is_refused(lambda: open({secret!r})), is_refused(lambda: os.kill({pid}, 0)))
"""


def _try_out(keeper: SpawnerClient) -> str | None:
    sockets = keeper.start_sandbox()
    with sockets.talk, sockets.control, tempfile.NamedTemporaryFile() as secret:
        for each in sockets:
            each.settimeout(_CHECK_S)
        os.chmod(secret.name, 0o644)
        source = _TRIAL.format(secret=secret.name, pid=os.getpid())
        try:
            _receive(sockets.talk)
            limits = {"timeout_s": _CHECK_S, "max_output_bytes": 1024}
            _send(sockets.talk, {"op": "python", "source": source, **limits})
            answer = _receive(sockets.talk)
        except (OSError, EOFError, ValueError) as error:
            return _last_words(sockets) or keeper.last_words() or f"{error}"
        if answer.get("stdout") != "True True\n":
            return f"it does not keep code in: {answer}"
        return None


def _last_words(sockets: Sockets) -> str:
    try:
        sockets.control.shutdown(socket.SHUT_WR)
        return sockets.control.recv(4096).decode(errors="replace").strip()
    except OSError:
        return ""


def _send(talk: socket.socket, record: dict[str, Any]) -> None:
    body = json.dumps(record).encode()
    talk.sendall(_HEAD.pack(len(body)) + body)


def _receive(talk: socket.socket) -> dict[str, Any]:
    with talk.makefile("rb") as file:
        (size,) = _HEAD.unpack(_exactly(file.read(_HEAD.size), _HEAD.size))
        return json.loads(_exactly(file.read(size), size))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise EOFError("its guest ended")
    return data


logger = logging.getLogger(__name__)

MakeSandbox = Callable[[SandboxConfig], Sandbox]


class SharedSandbox:
    """The sandbox of a plug-in, which is built before there is an event loop.

    A run has one event loop, and so one sandbox; where a later loop asks, as in tests, it gets a
    new one.

    Args:
        config: Its keys.
        make: Makes it; None: `make_sandbox`. A test may give its own.
    """

    def __init__(self, config: SandboxConfig, make: MakeSandbox | None = None) -> None:
        self.config = config
        self._sandboxes = PerLoop(partial(make or _make_sandbox, config))

    def get(self) -> Sandbox:
        """Give the running loop's sandbox.

        Raises:
            SandboxError: where no provider can be had.
            MissingExtraError: where the one that was asked for is not installed.
        """
        return self._sandboxes.get()

    async def close(self) -> None:
        """End the sandbox; one of a loop that is gone ended with it. May be called twice."""
        if (sandbox := self._sandboxes.pop()) is not None:
            await sandbox.close()


def check_sandbox(config: SandboxConfig, *, key: str) -> None:
    """Find the provider, so that a run which has none ends before it begins.

    Args:
        config: The sandbox's keys.
        key: Where they stand, for the error.

    Raises:
        SandboxError: with what is missing.
        MissingExtraError: likewise.
        ConfigError: for a key that this provider needs.
    """
    try:
        _make_sandbox(config)
    except AgentRLError as error:
        inner = error.details.get("key")
        error.details["key"] = f"{key}.{inner}" if inner else key
        raise


def tell_unread(config: SandboxConfig, *, key: str) -> None:
    """Warn of keys of a plug-in's sandbox that are set and have no effect."""
    for name, reason in config.find_unread().items():
        logger.warning("%s.%s has no effect: %s", key, name, reason)


def _make_sandbox(config: SandboxConfig) -> Sandbox:
    from agentrl.sandbox.factory import make_sandbox

    return make_sandbox(config)
