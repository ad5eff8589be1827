"""A sandbox on this machine. Each session and each program has a guest of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.plugins.call import setting_up
from agentrl.sandbox.base import Execution
from agentrl.sandbox.guest_client import GuestClient, WarmPool
from agentrl.sandbox.spawner_client import AgentAccess, LocalProvider, SpawnerClient

_NEW_SANDBOX = "[a new sandbox: what was left in the old one is gone]\n"


class LocalSandbox:
    """Runs code on this machine under a provider. Made by `make_sandbox`.

    Args:
        config: The sandbox's keys.
        provider: The provider that isolates the code.
        access: What an agent reaches; None for other code.
    """

    def __init__(
        self, config: SandboxConfig, provider: LocalProvider, access: AgentAccess | None = None
    ) -> None:
        self.config, self.provider = config, provider
        self._spawner = SpawnerClient(config, provider, access)
        self._pool = WarmPool(partial(GuestClient.start, self._spawner), config.num_warm)
        self._guests: set[GuestClient] = set()
        self._is_closed = False

    async def open_python(self) -> "LocalSession":
        """Open a session of a Python interpreter, which starts with its first call."""
        return LocalSession(self, "python")

    async def open_shell(self) -> "LocalSession":
        """Open a session of a shell: each call is a new one in the same folder."""
        return LocalSession(self, "shell")

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program in a new folder; see `Sandbox.run_program`."""
        if not argv:
            raise ValueError("argv is empty: a program was expected")
        request = {
            "op": "program",
            "argv": [*argv],
            "stdin": stdin,
            "env": {**(env or {})},
            "files": {**(files or {})},
        }
        guest = await self.take()
        try:
            return await self.ask(guest, request, timeout_s, max_output_bytes)
        finally:
            await self.discard(guest)

    async def ask(
        self,
        guest: GuestClient,
        request: Mapping[str, Any],
        timeout_s: float | None,
        max_output_bytes: int | None,
    ) -> Execution:
        """Run a request on a guest; a limit of None is the configured one."""
        config = self.config
        return await guest.ask(
            request,
            timeout_s=config.timeout_s if timeout_s is None else timeout_s,
            max_output_bytes=config.max_output_bytes
            if max_output_bytes is None
            else max_output_bytes,
        )

    async def take(self) -> GuestClient:
        """Return a guest that was never used before.

        Raises:
            SandboxError: If none starts, or the sandbox is closed.
        """
        self._check_open()
        with setting_up():  # a start has its own limit
            guest = await self._pool.take()
        self._guests.add(guest)
        if self._is_closed:  # meanwhile
            await self.discard(guest)
            self._check_open()
        return guest

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox is closed", provider=self.provider)

    async def discard(self, guest: GuestClient) -> None:
        """End a guest and wait until nothing of it is left."""
        self._guests.discard(guest)
        await guest.close()

    async def close(self) -> None:
        """Kill everything and delete every file. May be called twice."""
        self._is_closed = True
        await self._pool.close()
        await asyncio.gather(*(self.discard(guest) for guest in [*self._guests]))
        await self._spawner.close()


class LocalSession:
    """One request's guest, which starts with its first call. Made by `LocalSandbox`.

    Args:
        sandbox: The sandbox that provides the guest.
        op: What each call runs.
    """

    def __init__(self, sandbox: LocalSandbox, op: Literal["python", "shell"]) -> None:
        self._sandbox, self._op = sandbox, op
        self._guest: GuestClient | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()

    async def run(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        echo: bool = False,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run code after the earlier calls; see `Session.run`."""
        async with self._lock:
            guest, note = await self._prepare()
            request = {"op": self._op, "source": source, "note": note, "echo": echo}
            return await self._sandbox.ask(guest, request, timeout_s, max_output_bytes)

    async def _prepare(self) -> tuple[GuestClient, str]:
        """Return a guest, and a note for the code if it is a new one after another."""
        self._check_open()
        old = self._guest
        if old is not None and old.is_alive:
            return old, ""
        if old is not None:
            await self._sandbox.discard(old)
        guest = await self._sandbox.take()
        if self._is_closed:  # meanwhile
            await self._sandbox.discard(guest)
            self._check_open()
        self._guest = guest
        return guest, "" if old is None else _NEW_SANDBOX

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the session is closed", provider=self._sandbox.provider)

    async def close(self) -> None:
        """Kill what runs and delete the files. May be called twice."""
        self._is_closed = True
        guest, self._guest = self._guest, None
        if guest is not None:
            await self._sandbox.discard(guest)
