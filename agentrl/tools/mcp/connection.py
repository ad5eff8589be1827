"""One connection to one MCP server, by the official client library.

The standard error of a server that is started here goes to the log (`agentrl.tools.mcp.stderr`,
level INFO), never to the terminal. Its last lines are kept for the error message if it fails.
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
from typing import TYPE_CHECKING, Any, Self, cast

from agentrl.clients.http import bounding_hooks
from agentrl.tools.mcp.servers import HttpServer, Server, StdioServer

if TYPE_CHECKING:
    from httpx2 import Response
    from mcp.client import Client
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage

stderr_logger = logging.getLogger("agentrl.tools.mcp.stderr")

MAX_LAST_WORDS = 10
"""Lines of a server's standard error that are kept."""
MAX_LINE_CHARACTERS = 500
MAX_MESSAGE_BYTES = 8 * 1024**2
"""Bytes of one message (over HTTP: of one answer); a server that sends more is disconnected."""
_HTTP_TIMEOUT_S = 30.0
_HTTP_READ_TIMEOUT_S = 3600.0
"""Long, because the call has a time-out of its own."""


@asynccontextmanager
async def connect(
    server: Server, *, last_words: deque[str], on_end: Callable[[], None]
) -> AsyncGenerator["Client", None]:
    """Hold a connection open. One task must enter and leave it, as the library requires.

    Args:
        server: The server to connect to.
        last_words: Receives the lines of the server's standard error; over HTTP, the status of each
            request that it refuses.
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
        watched = _StreamWithEnd(incoming, on_end)
        yield cast("ReadStream[SessionMessage | Exception]", watched), outgoing


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
                errors.close()  # else the pipe stays open when the server ends
                yield streams
        finally:
            transport.close()


def _find_program(spec: StdioServer) -> str:
    """Find the program of a server, in the folder and PATH that it will have.

    Raises:
        FileNotFoundError: if there is none.
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
        # The library's error does not contain the status.
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
        """Log the complete lines; a line that does not end is cut."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._rest) > MAX_LINE_CHARACTERS:
            self._log(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Log the rest after the last line end."""
        if self._rest:
            self._log(self._rest)

    def _log(self, line: bytes) -> None:
        text = line[:MAX_LINE_CHARACTERS].decode(errors="replace").rstrip()
        self._last_words.append(text)
        stderr_logger.info("%s: %s", self._server, text)


class _StreamWithEnd:
    """The stream of a server's messages, with a callback at its end."""

    def __init__(
        self, stream: "ReadStream[SessionMessage | Exception]", on_end: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._on_end = on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

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
