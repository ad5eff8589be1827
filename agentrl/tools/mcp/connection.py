"""One connection to one MCP server, by the official client library.

A server that is started here writes its errors to the log (`agentrl.tools.mcp.stderr`, level INFO),
never to the terminal; its last lines are kept for the error that says why it did not start.
"""

import asyncio
import errno
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl.clients.http import bounding_hooks
from agentrl.tools.mcp.servers import HttpServer, Server, StdioServer

if TYPE_CHECKING:
    from httpx2 import Response
    from mcp.client import Client
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage

stderr_logger = logging.getLogger("agentrl.tools.mcp.stderr")

MAX_LAST_WORDS = 10
"""Lines of a server's errors that are kept."""
MAX_LINE_CHARACTERS = 500
MAX_MESSAGE_BYTES = 8 * 1024**2
"""Bytes of one message (over HTTP: of one answer); a server that sends more is given up."""
_HTTP_TIMEOUT_S = 30.0
_HTTP_READ_TIMEOUT_S = 3600.0
"""A server may think for long before it answers; the call's own time-out is the one that counts."""


@asynccontextmanager
async def connect(
    server: Server, *, last_words: deque[str], on_end: Callable[[], None]
) -> AsyncGenerator["Client", None]:
    """Hold a connection open. To be entered and left by one task: the library's scopes ask for it.

    Args:
        server: Whom to connect to.
        last_words: Told what the server writes to its standard error, and over HTTP the status of
            what it refuses.
        on_end: Called when the server has closed the connection.
    """
    from mcp.client import Client

    async with Client(_transport(server, last_words, on_end)) as client:
        yield client


@asynccontextmanager
async def _transport(
    server: Server, last_words: deque[str], on_end: Callable[[], None]
) -> AsyncGenerator["TransportStreams", None]:
    opened = (
        _start(server.name, server.spec, last_words)
        if isinstance(server.spec, StdioServer)
        else _reach(server.spec, last_words)
    )
    async with opened as (incoming, outgoing):
        yield _Watched(incoming, on_end), outgoing


@asynccontextmanager
async def _start(
    name: str, spec: StdioServer, last_words: deque[str]
) -> AsyncGenerator["TransportStreams", None]:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    relay = ["-I", "-S", str(Path(__file__).with_name("relay.py")), str(MAX_MESSAGE_BYTES)]
    parameters = StdioServerParameters(
        command=sys.executable,
        args=[*relay, _find_program(spec), *spec.args],
        env=spec.env,
        cwd=spec.cwd,
    )
    readable, writable = os.pipe()
    with os.fdopen(writable, "w") as errors:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: _ErrorLines(name, last_words), os.fdopen(readable, "rb")
        )
        try:
            async with stdio_client(parameters, errlog=errors) as streams:
                errors.close()  # the server has its own end; with ours open, its end is never seen
                yield streams
        finally:
            transport.close()


def _find_program(spec: StdioServer) -> str:
    """Look for the program of a server where it will run.

    Raises:
        FileNotFoundError: if it is not there.
    """
    path = (spec.env or {}).get("PATH", os.environ.get("PATH"))
    folder = spec.cwd or Path.cwd()
    program = str(folder / spec.command) if os.sep in spec.command else spec.command
    if (found := shutil.which(program, path=path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), spec.command)
    return found


@asynccontextmanager
async def _reach(
    spec: HttpServer, last_words: deque[str]
) -> AsyncGenerator["TransportStreams", None]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def note(response: "Response") -> None:
        # The library says of a refusal that it was one, and not which.
        if response.request.method == "POST" and not response.is_success:
            last_words.append(f"HTTP {response.status_code} {response.reason_phrase}".rstrip())

    timeout = httpx2.Timeout(_HTTP_TIMEOUT_S, read=_HTTP_READ_TIMEOUT_S)
    hooks = bounding_hooks(httpx2, MAX_MESSAGE_BYTES)
    hooks["response"].append(note)
    async with (
        httpx2.AsyncClient(headers=spec.headers, timeout=timeout, event_hooks=hooks) as http,
        streamable_http_client(spec.url, http_client=http) as streams,
    ):
        yield streams


class _ErrorLines(asyncio.Protocol):
    """Log what a server writes to its standard error, line by line."""

    def __init__(self, server: str, last_words: deque[str]) -> None:
        self._server = server
        self._last_words = last_words
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Log the lines that are whole; one that does not end is cut."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > MAX_LINE_CHARACTERS:
            self._tell(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Log what stands behind the last line's end."""
        if self._rest:
            self._tell(self._rest)

    def _tell(self, line: bytes) -> None:
        text = line[:MAX_LINE_CHARACTERS].decode(errors="replace").rstrip()
        self._last_words.append(text)
        stderr_logger.info("%s: %s", self._server, text)


class _Watched:
    """The stream of a server's messages, which also says when there will be no more."""

    def __init__(
        self, stream: "ReadStream[SessionMessage | Exception]", on_end: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._on_end = on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self) -> "SessionMessage | Exception":
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "SessionMessage | Exception":
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)
