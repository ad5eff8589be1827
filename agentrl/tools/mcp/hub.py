"""The servers of one tool YAML: their tools, asked for before a run, and their sessions.

A session that broke (its server died, its connection was lost) is replaced by the next call. The
state that the server kept for it is lost.
"""

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.errors import ServiceError
from agentrl.tools.mcp.servers import Server, SessionScope
from agentrl.tools.mcp.session import Session, innermost
from agentrl.tools.runtime.settings import RetrySettings

if TYPE_CHECKING:
    from mcp_types import Tool

RETRY = RetrySettings(max_attempts=3, wait_initial_s=0.5)
MAX_TOOLS = 1000
"""Tools of one server: each is shown to the policy, and has a schema to check."""
_MAX_PAGES = 1000
_PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError)
"""Errors that another attempt does not fix."""

_WHOLE_RUN = ""
"""The owner of a shared session."""


class Sessions:
    """The sessions with one server: one for the run, or one for each request.

    A shared session is opened by the first call, and closed with the run. The session of a request
    is opened by `begin`, shared by the server's tools in that request, and closed when the last of
    them calls `end`.
    """

    def __init__(self, server: Server, scope: SessionScope) -> None:
        self._server = server
        self._is_shared = scope is SessionScope.SHARED
        self._current: dict[str, Session] = {}
        self._broken: list[tuple[str, Session]] = []
        """Replaced sessions; their servers may not have ended yet."""
        self._users: dict[str, set[str]] = {}
        """The tools that use the session of a request."""

    async def begin(self, request: str, tool: str) -> None:
        """Open the request's session, if it has its own."""
        if not self._is_shared:
            self._users.setdefault(request, set()).add(tool)
            await self.of(request).open()

    def of(self, request: str) -> Session:
        """Return the session for a request's calls; a new one if the last one broke."""
        owner = _WHOLE_RUN if self._is_shared else request
        session = self._current.get(owner)
        if session is not None:
            if session.is_usable:
                return session
            self._broken = [(name, old) for name, old in self._broken if not old.has_ended]
            self._broken.append((owner, session))
        self._current[owner] = session = Session(self._server)
        return session

    async def end(self, request: str, tool: str) -> None:
        """Give back what `begin` opened, or was about to open."""
        users = self._users.get(request, set())
        users.discard(tool)
        if not self._is_shared and not users:
            self._users.pop(request, None)
            await self.close(request)

    async def close(self, owner: str | None = None) -> None:
        """Close the sessions of one owner, or of all, that belong to this event loop."""
        held = [*self._broken, *self._current.items()]
        closing = [(name, s) for name, s in held if owner in (None, name) and s.is_on_this_loop]
        for name, session in closing:
            if self._current.get(name) is session:
                del self._current[name]
        await asyncio.gather(*(session.close() for _, session in closing))
        self._broken = [entry for entry in self._broken if entry not in closing]


class Hub:
    """The servers of one tool YAML. Entries that name the same server share its sessions."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[SessionScope, str], Sessions] = {}
        self._tools: dict[str, list[Tool]] = {}

    def sessions(self, server: Server, scope: SessionScope) -> Sessions:
        """Return the sessions with a server; nothing is opened."""
        key = (scope, server.identity)
        if key not in self._sessions:
            self._sessions[key] = Sessions(server, scope)
        return self._sessions[key]

    def tools(self, servers: Sequence[Server]) -> "list[tuple[Server, list[Tool]]]":
        """Return each server with its tools; each server is asked once.

        Raises:
            ServiceError: for the first server that returned no list.
        """
        new = [server for server in servers if server.identity not in self._tools]
        for server, tools in zip(new, discover(new) if new else [], strict=True):
            self._tools[server.identity] = tools
        return [(server, self._tools[server.identity]) for server in servers]


def discover(servers: Sequence[Server]) -> list[list["Tool"]]:
    """Ask each server for its tools, all at once, three times if it does not answer.

    May be called while an event loop runs in this thread. It then blocks that loop, at most for
    three times the longest `connect_timeout_s`, and the pauses.

    Returns:
        The tools of each server, as it describes them.

    Raises:
        ServiceError: for the first server that returned no list.
    """
    answers: list[list[Tool] | BaseException] = []

    async def ask_all() -> None:
        asked = (_ask_again(server) for server in servers)
        answers.extend(await asyncio.gather(*asked, return_exceptions=True))

    # A daemon thread: neither Ctrl-C nor the end of the process waits for it.
    thread = threading.Thread(
        target=lambda: asyncio.run(ask_all()), name="agentrl-mcp-discovery", daemon=True
    )
    thread.start()
    thread.join()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _ask_again(server: Server) -> list["Tool"]:
    attempt = 1
    while True:
        try:
            return await _ask(server)
        except ServiceError as error:
            is_permanent = isinstance(innermost(error.__cause__ or error), _PERMANENT)
            if is_permanent or attempt >= RETRY.max_attempts:
                raise
        await asyncio.sleep(RETRY.pause_s(attempt))
        attempt += 1


async def _ask(server: Server) -> list["Tool"]:
    session = Session(server)
    try:
        client = await session.open()
        async with asyncio.timeout(server.connect_timeout_s):
            page = await client.list_tools()
            tools = list(page.tools)
            for _ in range(_MAX_PAGES):
                if page.next_cursor is None or len(tools) > MAX_TOOLS:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
        if len(tools) > MAX_TOOLS:
            raise ValueError(f"it lists more than {MAX_TOOLS} tools")
        return tools
    except ServiceError:
        raise
    except Exception as error:
        raise session.unavailable(error) from error
    finally:
        await session.close()
