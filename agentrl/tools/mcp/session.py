"""A session with an MCP server: opened by a task of its own, called from any task, closed once.

The client library requires that the task that entered its scopes leaves them, and a transport that
fails cancels that task. So a task of its own holds each session open. A failure in that task ends
the running calls of the session, and nothing else.
"""

import asyncio
import logging
from collections import deque
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from agentrl.errors import ServiceError, ToolError
from agentrl.plugins.call import setting_up
from agentrl.tools.mcp.connection import MAX_LAST_WORDS, connect
from agentrl.tools.mcp.servers import HttpServer, Server

if TYPE_CHECKING:
    from mcp.client import Client
    from mcp_types import CallToolResult

logger = logging.getLogger(__name__)


class Session:
    """Open a session, and hold it until it is closed or breaks. Needs a running event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._last_words: deque[str] = deque(maxlen=MAX_LAST_WORDS)
        self._is_decided = asyncio.Event()
        """Set when the session is open, or has failed to open."""
        self._must_close = asyncio.Event()
        self._client: Client | None = None
        self._error: Exception | None = None
        self._num_calls = 0
        self._is_broken = False
        self._task = asyncio.create_task(self._hold(), name=f"mcp:{server.name}")

    @property
    def is_on_this_loop(self) -> bool:
        """Whether it was opened on the running event loop."""
        return self._loop is asyncio.get_running_loop()

    @property
    def is_usable(self) -> bool:
        """Whether another call may be made, on the running event loop."""
        return not self._is_broken and self.is_on_this_loop

    @property
    def has_ended(self) -> bool:
        """Whether the session and its server have ended."""
        return self._task.done()

    async def open(self) -> "Client":
        """Wait until it is open.

        Raises:
            ServiceError: if the server did not start, cannot be reached, or sends no greeting.
        """
        with setting_up():  # within `connect_timeout_s`
            await self._is_decided.wait()
        if self._client is None:
            error = self._error or ConnectionError("the session was closed")
            raise self.unavailable(error) from error
        return self._client

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """Call a tool; any number of calls may run at once. Cancelling notifies the server.

        Raises:
            ToolError: if the server refuses the arguments.
            ServiceError: if the session broke during the call, or the server failed.
        """
        from mcp.shared.exceptions import MCPError
        from mcp_types import INVALID_PARAMS

        client = await self.open()
        self._num_calls += 1
        try:
            # A server reports progress only if it is asked to.
            progress = partial(_note_progress, f"{self._server.name}: {tool}")
            return await client.call_tool(tool, arguments, progress_callback=progress)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(f"Error: {error.message}") from error
            # Over HTTP, any error may mean that the server has lost the session. The end of a
            # process is seen on its stream.
            self._is_broken = self._is_broken or isinstance(self._server.spec, HttpServer)
            raise self.unavailable(error) from error
        finally:
            self._num_calls -= 1
            if self._is_broken and not self._num_calls:
                self._must_close.set()

    async def close(self) -> None:
        """End the session, and the server if it was started here. May be called twice."""
        self._is_broken = True
        self._must_close.set()
        if not self._is_decided.is_set():
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.connect_timeout_s):
                    connection = connect(
                        self._server, last_words=self._last_words, on_end=self._lose
                    )
                    self._client = await stack.enter_async_context(connection)
                self._is_decided.set()
                await self._must_close.wait()
        except Exception as error:  # noqa: BLE001 - raised to the callers that wait
            self._error = error
        finally:
            self._is_broken = True
            self._is_decided.set()

    def _lose(self) -> None:
        self._is_broken = True
        self._must_close.set()

    def unavailable(self, error: Exception) -> ServiceError:
        """Return an error of the server, with the last lines of its output."""
        return ServiceError(
            f"MCP server {self._server.label}: {_describe(error)}",
            service=self._server.name,
            expected=f"an answer within {self._server.connect_timeout_s:g} s"
            if isinstance(error, TimeoutError)
            else None,
            last_words="\n".join(self._last_words) or None,
        )


async def _note_progress(
    call: str, progress: float, total: float | None, message: str | None
) -> None:
    logger.debug("%s: %g of %s %s", call, progress, total or "?", message or "")


def _describe(error: BaseException) -> str:
    """Describe an error without the groups that the library wraps it in."""
    error = innermost(error)
    if isinstance(error, TimeoutError):
        return "no valid answer in time"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def innermost(error: BaseException) -> BaseException:
    """Return the first error of a group, of any depth."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return innermost(group.exceptions[0])
    return error
