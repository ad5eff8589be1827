"""The trainer's side of one guest. What a guest sends is bounded and checked, never trusted."""

import asyncio
import json
import os
import time
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Execution, ExecutionEnd
from agentrl.sandbox.inside.frames import HEAD, pack_frame
from agentrl.sandbox.inside.processes import SIGKILLED
from agentrl.sandbox.spawner_client import SpawnerClient

_START_S, _GRACE_S, _END_S = 30.0, 2.0, 10.0
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output."""
_OVERHEAD_BYTES = 128 * 1024
_MAX_STARTING = max(2, os.cpu_count() or 2)
_USED_MEMORY = "[killed: it used more memory than it may]\n"
_execution = TypeAdapter(Execution)


class GuestClient:
    """Sends requests to one guest, one at a time. Made by `GuestClient.start`.

    Args:
        streams: The guest's streams.
        control: Its supervisor's streams.
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
    async def start(cls, spawner: SpawnerClient) -> "GuestClient":
        """Start a sandbox and wait until its guest is ready.

        Raises:
            SandboxError: If it does not start.
        """
        try:
            return await cls._start(spawner)
        except SandboxError:
            if not await spawner.has_died():
                raise
        return await cls._start(spawner)  # with a new spawner

    @classmethod
    async def _start(cls, spawner: SpawnerClient) -> "GuestClient":
        sockets = spawner.start_sandbox()
        try:
            streams = await asyncio.open_unix_connection(sock=sockets.guest)
        except BaseException:
            sockets.guest.close()
            sockets.control.close()
            raise
        try:
            control = await asyncio.open_unix_connection(sock=sockets.control)
        except BaseException:
            streams[1].transport.abort()  # it has taken the socket over
            sockets.control.close()
            raise
        client = cls(streams, control)
        try:
            async with asyncio.timeout(_START_S):
                await client._receive(_OVERHEAD_BYTES)
        except (TimeoutError, _GuestDiedError):
            reason = await client.close() or spawner.last_error() or "no error was reported"
            raise SandboxError(
                f"a sandbox does not start: {reason}", provider=spawner.provider
            ) from None
        except BaseException:
            await client.abort()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        """Whether the guest can take a request."""
        return self._is_open and not self._reader.at_eof()

    async def ask(
        self, request: Mapping[str, Any], *, timeout_s: float, max_output_bytes: int
    ) -> Execution:
        """Run one request. A guest that does not answer is killed, and so is one on
        cancellation.
        """
        started = time.monotonic()
        await self._was_killed_for_memory()  # forgets the kills of earlier requests
        limits = {"timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                self._writer.write(pack_frame({**request, **limits}))
                with suppress(ConnectionError):  # then no answer comes either
                    await self._writer.drain()
                max_frame_bytes = max_output_bytes * _ESCAPED + _OVERHEAD_BYTES
                answer = _checked(await self._receive(max_frame_bytes))
        except TimeoutError:
            end, note = ExecutionEnd.TIMEOUT, "[killed: its time was up]\n"
        except _GuestDiedError:
            end, note = ExecutionEnd.KILLED, "[killed, with all that ran beside it]\n"
        except BaseException:
            await self.abort()
            raise
        else:
            is_killed = answer.end is ExecutionEnd.KILLED and answer.stderr.endswith(SIGKILLED)
            if not (is_killed and await self._was_killed_for_memory()):
                return answer
            text = answer.stderr.removesuffix(SIGKILLED) + _USED_MEMORY
            return replace(answer, end=ExecutionEnd.MEMORY, stderr=text)
        await self.close()
        return Execution(end=end, stderr=note, seconds=time.monotonic() - started)

    async def _was_killed_for_memory(self) -> bool:
        """Whether the supervisor has killed a process for its memory since the last call."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(0):  # what was sent before the answer has arrived
                return bool(await self._control[0].read(_OVERHEAD_BYTES))
        return False

    async def _receive(self, max_frame_bytes: int) -> object:
        try:
            (size,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if size > max_frame_bytes:
                raise _GuestDiedError
            return json.loads(await self._reader.readexactly(size))
        except (IncompleteReadError, ConnectionError, ValueError, RecursionError):
            raise _GuestDiedError from None

    async def abort(self) -> None:
        """Have the sandbox killed and its files deleted, without waiting for that."""
        self._is_open = False
        for writer in (self._writer, self._control[1]):
            writer.transport.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next iteration

    async def close(self) -> str:
        """Kill the sandbox, wait until nothing is left of it, and return its last error."""
        reader, writer = self._control
        error = b""
        try:
            if self._is_open:
                self._is_open = False
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(_END_S):
                        writer.write_eof()
                        error = await reader.read()
        finally:
            await self.abort()
        return error.decode(errors="replace").strip().rpartition("\n")[2]


class _GuestDiedError(Exception):
    """The guest ended, or sent what no guest sends."""


def _checked(answer: object) -> Execution:
    """Check an answer and replace characters that are no text (half of a surrogate pair)."""
    try:
        found = _execution.validate_python(answer)
    except ValidationError:
        raise _GuestDiedError from None
    return replace(found, stdout=_to_text(found.stdout), stderr=_to_text(found.stderr))


def _to_text(text: str) -> str:
    return text.encode(errors="replace").decode()


class WarmPool:
    """Keeps started guests ready. A guest that was taken never comes back.

    Args:
        start: Starts a guest.
        num_warm: Guests to keep ready after the first request.
    """

    def __init__(self, start: Callable[[], Awaitable[GuestClient]], num_warm: int) -> None:
        self._start_guest, self._num_warm = start, num_warm
        self._ready: deque[GuestClient] = deque()
        self._starting = asyncio.Semaphore(_MAX_STARTING)
        self._refill: asyncio.Task[None] | None = None
        self._is_closed = False

    async def take(self) -> GuestClient:
        """Return a ready guest; if there is none, start one.

        Raises:
            SandboxError: If none starts.
        """
        guest: GuestClient | None = None
        while self._ready and guest is None:
            guest = self._ready.popleft()
            if not guest.is_alive:
                await guest.abort()
                guest = None
        guest = guest or await self._start()
        is_full = len(self._ready) >= self._num_warm
        if not (self._is_closed or is_full) and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill())
        return guest

    async def _start(self) -> GuestClient:
        async with self._starting:
            return await self._start_guest()

    async def _fill(self) -> None:
        # If this fails, the next request starts a guest itself and reports the error.
        with suppress(SandboxError):
            while len(self._ready) < self._num_warm:
                self._ready.append(await self._start())

    async def close(self) -> None:
        """End the guests that were not taken."""
        self._is_closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill])
        while self._ready:
            await self._ready.popleft().close()
