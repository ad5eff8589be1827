"""Ask MCP servers for their tools, before a run begins."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from agentrl.errors import ServiceError
from agentrl.tools.mcp.servers import Server
from agentrl.tools.mcp.session import Session, innermost

if TYPE_CHECKING:
    from mcp_types import Tool

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
