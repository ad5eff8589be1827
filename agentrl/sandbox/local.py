"""A sandbox on this machine: sessions and programs, each with a guest of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.base import Execution
from agentrl.sandbox.guest_client import GuestClient, GuestRequest, WarmPool
from agentrl.sandbox.spawner_client import LocalProvider, SpawnerClient

_NEW_SANDBOX = "[a new sandbox: what was left in the old one is gone]\n"


class LocalSandbox:
    """Runs code on this machine behind a provider's walls. Made by `make_sandbox`.

    Args:
        config: Its section.
        provider: Who keeps the code in.
    """

    def __init__(self, config: SandboxConfig, provider: LocalProvider) -> None:
        self.config, self.provider = config, provider
        self._keeper = SpawnerClient(config, provider)
        self._pool = WarmPool(self._start, config.num_warm)
        self._guests: set[GuestClient] = set()
        self._is_closed = False

    async def open_python(self) -> "LocalSession":
        """Open a session of a Python interpreter, which starts with its first call."""
        return LocalSession(self, "python")

    async def open_shell(self) -> "LocalSession":
        """Open a session of a shell: each call is a new one, in the same folder."""
        return LocalSession(self, "shell")

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program in a fresh folder; see `Sandbox.run_program`."""
        if not argv:
            raise ValueError("argv is empty: a program was expected")
        record: dict[str, object] = {"op": "program", "argv": [*argv], "stdin": stdin}
        record["files"] = {**(files or {})}
        guest = await self.take()
        try:
            return await guest.ask(self.as_ask(record, timeout_s, max_output_bytes))
        finally:
            await self.give_up(guest)

    def as_ask(
        self, record: dict[str, object], timeout_s: float | None, max_output_bytes: int | None
    ) -> GuestRequest:
        """Make a request of a record; None is the configuration's limit."""
        config = self.config
        return GuestRequest(
            record,
            timeout_s=config.timeout_s if timeout_s is None else timeout_s,
            max_output_bytes=config.max_output_bytes
            if max_output_bytes is None
            else max_output_bytes,
        )

    async def take(self) -> GuestClient:
        """Hand out a guest that nobody had before.

        Raises:
            SandboxError: where none starts, or the sandbox is closed.
        """
        self._check_open()
        guest = await self._pool.take()
        try:
            self._check_open()  # it may have been closed meanwhile
        except SandboxError:
            await guest.close()
            raise
        self._guests.add(guest)
        return guest

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox is closed", provider=self.provider)

    async def give_up(self, guest: GuestClient) -> None:
        """End a guest and wait until nothing of it is left."""
        self._guests.discard(guest)
        await guest.close()

    async def _start(self) -> GuestClient:
        return await GuestClient.start(self._keeper)

    async def close(self) -> None:
        """Kill everything and delete every file. May be called twice."""
        self._is_closed = True
        await self._pool.close()
        await asyncio.gather(*(self.give_up(guest) for guest in [*self._guests]))
        await self._keeper.close()


class LocalSession:
    """One request's guest, started with its first call. Made by `LocalSandbox`.

    Args:
        sandbox: Where it runs.
        op: What a call is.
    """

    def __init__(self, sandbox: LocalSandbox, op: Literal["python", "shell"]) -> None:
        self._sandbox, self._op = sandbox, op
        self._guest: GuestClient | None = None
        self._was_lost = self._is_closed = False
        self._turn = asyncio.Lock()

    async def run(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        echo: bool = False,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run code behind what ran before; see `Session.run`."""
        async with self._turn:
            note = await self._prepare()
            assert self._guest is not None
            record: dict[str, object] = {"op": self._op, "source": source, "note": note}
            record["echo"] = echo
            return await self._guest.ask(self._sandbox.as_ask(record, timeout_s, max_output_bytes))

    async def _prepare(self) -> str:
        """Have a guest; say what the code should know of it."""
        self._check_open()
        if self._guest is not None and self._guest.is_alive:
            return ""
        was_lost = self._guest is not None
        if self._guest is not None:
            await self._sandbox.give_up(self._guest)
        guest = await self._sandbox.take()
        try:
            self._check_open()  # it may have been closed meanwhile
        except SandboxError:
            await self._sandbox.give_up(guest)
            raise
        self._guest = guest
        return _NEW_SANDBOX if was_lost else ""

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the session is closed", provider=self._sandbox.provider)

    async def close(self) -> None:
        """Kill what runs and delete the files. May be called twice."""
        self._is_closed = True
        guest, self._guest = self._guest, None
        if guest is not None:
            await self._sandbox.give_up(guest)
