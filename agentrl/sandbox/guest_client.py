"""The trainer's end of one guest. What comes from it is bounded and checked, never trusted."""

import asyncio
import json
import os
import struct
import time
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Execution, ExecutionEnd
from agentrl.sandbox.spawner_client import SpawnerClient

_HEAD = struct.Struct(">I")
_START_S, _GRACE_S, _END_S = 30.0, 2.0, 10.0
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output."""
_OVERHEAD_BYTES = 128 * 1024
_execution = TypeAdapter(Execution)


@dataclass(frozen=True, slots=True)
class GuestRequest:
    """One request to a guest."""

    record: dict[str, Any]
    timeout_s: float
    max_output_bytes: int


class GuestClient:
    """Asks one guest, one request at a time. Made by `GuestClient.start`.

    Args:
        streams: Of the guest.
        control: Of its warden.
    """

    def __init__(
        self,
        streams: tuple[StreamReader, StreamWriter],
        control: tuple[StreamReader, StreamWriter],
    ) -> None:
        self._reader, self._writer = streams
        self._control = control
        self._is_open = True

    @classmethod
    async def start(cls, keeper: SpawnerClient) -> "GuestClient":
        """Start a sandbox and wait until its guest is ready.

        Raises:
            SandboxError: where it does not start.
        """
        try:
            return await cls._start(keeper)
        except SandboxError:
            if not await keeper.has_died():
                raise
        return await cls._start(keeper)  # by a new keeper

    @classmethod
    async def _start(cls, keeper: SpawnerClient) -> "GuestClient":
        sockets = keeper.start_sandbox()
        try:
            streams = await asyncio.open_unix_connection(sock=sockets.talk)
            control = await asyncio.open_unix_connection(sock=sockets.control)
        except BaseException:
            sockets.talk.close()
            sockets.control.close()
            raise
        link = cls(streams, control)
        try:
            async with asyncio.timeout(_START_S):
                await link._receive(_OVERHEAD_BYTES)
        except (TimeoutError, _GuestDiedError):
            words = await link.close() or keeper.last_words()
            raise SandboxError(
                f"a sandbox does not start: {words or 'it says nothing'}", provider=keeper.provider
            ) from None
        except BaseException:
            link.kill()
            raise
        return link

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._is_open and not self._reader.at_eof()

    async def ask(self, ask: GuestRequest) -> Execution:
        """Ask for one execution. A guest that does not answer is killed, as by cancellation."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(ask.timeout_s + _GRACE_S):
                limits = {"timeout_s": ask.timeout_s, "max_output_bytes": ask.max_output_bytes}
                await self._send({**ask.record, **limits})
                max_frame_bytes = ask.max_output_bytes * _ESCAPED + _OVERHEAD_BYTES
                return _checked(await self._receive(max_frame_bytes))
        except TimeoutError:
            end, note = ExecutionEnd.TIMEOUT, "[killed: its time was up]\n"
        except _GuestDiedError:
            end, note = ExecutionEnd.KILLED, "[killed, with all that ran beside it]\n"
        except BaseException:
            self.kill()
            raise
        await self.close()
        return Execution(end=end, stderr=note, seconds=time.monotonic() - started)

    async def _send(self, record: dict[str, Any]) -> None:
        body = json.dumps(record).encode()
        try:
            self._writer.write(_HEAD.pack(len(body)) + body)
            await self._writer.drain()
        except ConnectionError:
            raise _GuestDiedError from None

    async def _receive(self, max_frame_bytes: int) -> object:
        try:
            (size,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if size > max_frame_bytes:
                raise _GuestDiedError
            return json.loads(await self._reader.readexactly(size))
        except (IncompleteReadError, ConnectionError, ValueError, RecursionError):
            raise _GuestDiedError from None

    def kill(self) -> None:
        """Have it killed and its files deleted, without waiting for it."""
        self._is_open = False
        self._writer.close()
        self._control[1].close()

    async def close(self) -> str:
        """Kill it, wait until nothing is left of it, and say its last words."""
        if not self._is_open:
            return ""
        self._is_open = False
        reader, writer = self._control
        words = b""
        try:
            with suppress(TimeoutError, ConnectionError, OSError):
                async with asyncio.timeout(_END_S):
                    writer.write_eof()
                    words = await reader.read()
        finally:
            self.kill()
        return words.decode(errors="replace").strip().rpartition("\n")[2]


class _GuestDiedError(Exception):
    """The guest ended, or says what no guest says."""


def _checked(answer: object) -> Execution:
    """Check an answer. Text that is no text (half of a surrogate pair) is replaced."""
    try:
        found = _execution.validate_python(answer)
    except ValidationError:
        raise _GuestDiedError from None
    return Execution(
        end=found.end,
        stdout=_text(found.stdout),
        stderr=_text(found.stderr),
        exit_code=found.exit_code,
        seconds=found.seconds,
        num_cut_bytes=found.num_cut_bytes,
    )


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


_MAX_STARTING = max(2, os.cpu_count() or 2)


class WarmPool:
    """Hands out guests and starts others behind them; one that was handed out never comes back.

    Args:
        start: Starts a guest.
        num_warm: How many are kept ready; from the first request on.
    """

    def __init__(self, start: Callable[[], Awaitable[GuestClient]], num_warm: int) -> None:
        self._start_guest, self._num_warm = start, num_warm
        self._ready: deque[GuestClient] = deque()
        self._starting = asyncio.Semaphore(_MAX_STARTING)
        self._refill: asyncio.Task[None] | None = None
        self._is_closed = False

    async def take(self) -> GuestClient:
        """Hand out a guest: a ready one, or one that is started for it.

        Raises:
            SandboxError: where none starts.
        """
        while self._ready:
            guest = self._ready.popleft()
            if guest.is_alive:
                self._begin_refill()
                return guest
            guest.kill()
        guest = await self._start()
        self._begin_refill()
        return guest

    async def _start(self) -> GuestClient:
        async with self._starting:
            return await self._start_guest()

    def _begin_refill(self) -> None:
        if self._is_closed or len(self._ready) >= self._num_warm:
            return
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        # Who asks next starts one itself, and hears why that fails.
        with suppress(SandboxError):
            while len(self._ready) < self._num_warm:
                self._ready.append(await self._start())

    async def close(self) -> None:
        """End the guests that nobody took."""
        self._is_closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill])
        while self._ready:
            await self._ready.popleft().close()
