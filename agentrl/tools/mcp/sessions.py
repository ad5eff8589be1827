"""Who shares a session: the whole run, or nobody.

A session that broke (its server died, its connection was lost) is replaced by the next call; what
the server knew of it is lost then.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from agentrl.tools.mcp.servers import Server, SessionScope
from agentrl.tools.mcp.session import Session

if TYPE_CHECKING:
    from mcp_types import Tool


class Sessions(Protocol):
    """The sessions with one server; shared by the tools that it has."""

    async def begin(self, request: str, tool: str) -> None:
        """Make ready what a tool needs for a request."""
        ...

    def of(self, request: str) -> Session:
        """Give the session for a request's calls, a new one where the last one broke."""
        ...

    async def end(self, request: str, tool: str) -> None:
        """Give back what `begin` made ready, or was about to."""
        ...

    async def close(self) -> None:
        """End every session of this event loop. Called for each tool."""
        ...


class SharedSession:
    """One session for the run, opened by the first call."""

    def __init__(self, server: Server) -> None:
        self._pool = _Pool(server)

    async def begin(self, request: str, tool: str) -> None:
        """Do nothing: the first call opens the session."""

    def of(self, request: str) -> Session:
        """Give the one session."""
        return self._pool.session("")

    async def end(self, request: str, tool: str) -> None:
        """Do nothing: the run goes on."""

    async def close(self) -> None:
        """End it."""
        await self._pool.close()


class SessionPerRequest:
    """A session for each request, shared by the server's tools there."""

    def __init__(self, server: Server) -> None:
        self._pool = _Pool(server)
        self._users: dict[str, set[str]] = {}

    async def begin(self, request: str, tool: str) -> None:
        """Open the request's session."""
        self._users.setdefault(request, set()).add(tool)
        await self._pool.session(request).open()

    def of(self, request: str) -> Session:
        """Give the request's session."""
        return self._pool.session(request)

    async def end(self, request: str, tool: str) -> None:
        """End the request's session, when the last of its tools gives it back."""
        users = self._users.get(request, set())
        users.discard(tool)
        if not users:
            self._users.pop(request, None)
            await self._pool.close(request)

    async def close(self) -> None:
        """End those that are left."""
        await self._pool.close()


class _Pool:
    """Sessions by owner."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._current: dict[str, Session] = {}
        self._retired: list[tuple[str, Session]] = []
        """Broken ones, whose servers may not have ended yet."""

    def session(self, owner: str) -> Session:
        session = self._current.get(owner)
        if session is not None and session.is_usable:
            return session
        if session is not None:
            self._retired = [(name, old) for name, old in self._retired if not old.has_ended]
            self._retired.append((owner, session))
        self._current[owner] = session = Session(self._server)
        return session

    async def close(self, owner: str | None = None) -> None:
        """End the sessions of one owner, or all of them; those of other event loops are let be."""
        held = [*self._retired, *self._current.items()]
        ended = [(name, old) for name, old in held if owner in (None, name) and old.is_at_home]
        for entry in ended:
            if self._current.get(entry[0]) is entry[1]:
                del self._current[entry[0]]
        await asyncio.gather(*(session.close() for _, session in ended))
        self._retired = [entry for entry in self._retired if entry not in ended]


_KINDS = {
    SessionScope.SHARED: SharedSession,
    SessionScope.PER_REQUEST: SessionPerRequest,
}


class Hub:
    """The servers of one tool YAML: entries that name the same one share what is known and open."""

    def __init__(self) -> None:
        self._made: dict[tuple[SessionScope, str], Sessions] = {}
        self._listed: dict[str, list[Tool]] = {}

    def sessions(self, server: Server, scope: SessionScope) -> Sessions:
        """Give the sessions with a server; nothing is opened."""
        key = (scope, server.identity)
        if key not in self._made:
            self._made[key] = _KINDS[scope](server)
        return self._made[key]

    def tools(self, servers: Sequence[Server]) -> "list[tuple[Server, list[Tool]]]":
        """Give each server with the tools that it says it has; each is asked once.

        Raises:
            ServiceError: for the first server that gave no list.
        """
        from agentrl.tools.mcp.discovery import discover

        new = [server for server in servers if server.identity not in self._listed]
        for server, tools in zip(new, discover(new) if new else [], strict=True):
            self._listed[server.identity] = tools
        return [(server, self._listed[server.identity]) for server in servers]
