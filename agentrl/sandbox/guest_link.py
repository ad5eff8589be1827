"""The trainer's end of one guest. What comes from it is bounded and checked, never trusted."""

import asyncio
import json
import struct
import time
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import SandboxError
from agentrl.sandbox.keeper_process import KeeperProcess
from agentrl.sandbox.records import Execution, ExecutionEnd

_HEAD = struct.Struct(">I")
_START_S, _GRACE_S, _END_S = 30.0, 2.0, 10.0
_ESCAPED = 6
"""Bytes that JSON may need for one byte of output."""
_OVERHEAD_BYTES = 128 * 1024
_execution = TypeAdapter(Execution)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to a guest."""

    record: dict[str, Any]
    timeout_s: float
    max_output_bytes: int


class GuestLink:
    """Asks one guest, one request at a time. Made by `GuestLink.start`.

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
    async def start(cls, keeper: KeeperProcess) -> "GuestLink":
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
    async def _start(cls, keeper: KeeperProcess) -> "GuestLink":
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

    async def ask(self, ask: Ask) -> Execution:
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
