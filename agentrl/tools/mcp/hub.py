"""Who shares a session: the whole run, or nobody.

A session that broke (its server died, its connection was lost) is replaced by the next call; what
the server knew of it is lost then.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from agentrl.errors import ServiceError
from agentrl.tools.mcp.servers import Server, SessionScope
from agentrl.tools.mcp.session import Session, innermost

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
        from agentrl.tools.mcp.hub import discover

        new = [server for server in servers if server.identity not in self._listed]
        for server, tools in zip(new, discover(new) if new else [], strict=True):
            self._listed[server.identity] = tools
        return [(server, self._listed[server.identity]) for server in servers]


T = TypeVar("T")

MAX_ATTEMPTS = 3
_WAIT_INITIAL_S = 0.5
_WAIT_MAX_S = 5.0
_NOT_PASSING = (FileNotFoundError, PermissionError, NotADirectoryError)
_MAX_PAGES = 1000
MAX_TOOLS = 1000
"""Tools of one server: each of them is shown to the policy, and has a schema to check."""


def discover(servers: Sequence[Server]) -> list[list["Tool"]]:
    """Ask each server for its tools, all at once, three times where it does not answer.

    Works where an event loop is running too, which it holds up meanwhile: at most for three times
    the longest `connect_timeout_s`, and the moments between.

    Returns:
        For each server what it has, as it says it.

    Raises:
        ServiceError: for the first server that gave no list.
    """
    return _run_apart(_discover(servers))


async def _discover(servers: Sequence[Server]) -> list[list["Tool"]]:
    asked = (_ask_again(server) for server in servers)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _ask_again(server: Server) -> list["Tool"]:
    attempts = AsyncRetrying(
        stop=stop_after_attempt(MAX_ATTEMPTS),
        wait=wait_exponential_jitter(multiplier=_WAIT_INITIAL_S, max=_WAIT_MAX_S),
        retry=retry_if_exception(_is_passing),
        reraise=True,
    )
    return await attempts(_ask, server)


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
            raise session.unavailable(ValueError(f"it lists more than {MAX_TOOLS} tools"))
        return tools
    except ServiceError:
        raise
    except Exception as error:
        raise session.unavailable(error) from error
    finally:
        await session.close()


def _is_passing(error: BaseException) -> bool:
    """Whether a server may answer if it is asked again: not one whose program is not there."""
    cause = innermost(error.__cause__ or error)
    return isinstance(error, ServiceError) and not isinstance(cause, _NOT_PASSING)


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop of its own on a thread, which holds up no Ctrl-C and no end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="agentrl-mcp-discovery", daemon=True).start()
    return done.result()
