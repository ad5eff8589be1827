"""The gateway: an HTTP server per process that agents use as their model's API.

The key of a call names its request, so any number of agents run at once. Dialects translate; the
session of the request samples and keeps the tokens. A client that floods, disconnects or sends
garbage affects its own request only.
"""

import asyncio
import logging
import resource
import secrets
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from aiohttp import http_exceptions, web

from agentrl.agent_loops.gateway.anthropic_messages import AnthropicMessages
from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply
from agentrl.agent_loops.gateway.dialect import Dialect, Event
from agentrl.agent_loops.gateway.limits import is_large
from agentrl.agent_loops.gateway.openai_chat import OpenAIChat
from agentrl.agent_loops.gateway.openai_responses import OpenAIResponses
from agentrl.agent_loops.gateway.sessions import GatewaySession, GatewaySettings, PendingCall
from agentrl.agent_loops.gateway.trajectory import Trajectory
from agentrl.engines.protocol import CompletionSource
from agentrl.messages import dump_json
from agentrl.plugins.cancellation import wait_despite_cancellation
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

logger = logging.getLogger(__name__)

MAX_ENDED_KEYS = 65_536
"""Ended keys that are remembered, so that their calls get 410 instead of 401."""
MAX_HEADER_BYTES = 16 << 10

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": AnthropicMessages(),
}
"""Each route of completions, and its dialect."""


class Gateway:
    """Serves the policy to agents. Start one per process.

    The server starts with the first session. `close` stops it.

    Args:
        settings: Where it listens, and its limits.
        routes: Further routes of the server.

    Example:
        >>> async with Gateway() as gateway:
        ...     async with gateway.session(request, context, source) as session:
        ...         await run_agent(session.base_url, session.key)
        ...     request.finish(session.stop_reason)
    """

    def __init__(
        self, settings: GatewaySettings | None = None, *, routes: Sequence[web.RouteDef] = ()
    ) -> None:
        self.settings = settings or GatewaySettings()
        self._routes = routes
        self._sessions: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._greeted: set[Any] = set()
        self._busy: set[Any] = set()
        self._address = ""
        self._socket_folder: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """URL of the server, without a path; empty before it starts."""
        return self._address

    @asynccontextmanager
    async def session(
        self,
        request: AsyncRolloutRequest,
        context: RolloutContext,
        source: CompletionSource | None = None,
    ) -> AsyncIterator[GatewaySession]:
        """Serve one pending request for the `with` block.

        Inside the block the request is running. After it, also after an error, the request has its
        sequences, and its key is refused. The caller ends it with a stop reason.

        Args:
            request: A pending request.
            context: Template, parser and settings of the run.
            source: Generates the completions; None: the engine of the context.
        """
        await self.start()
        request.take_edge(RequestState.RUNNING)
        trajectory = Trajectory(request, context, source or context.engine, settings=self.settings)
        key = f"agentrl-{secrets.token_urlsafe(24)}"
        session = GatewaySession(key, self._address, trajectory, self.settings)
        self._sessions[key] = session
        try:
            yield session
        finally:
            del self._sessions[key]
            self._ended[key] = None
            while len(self._ended) > MAX_ENDED_KEYS:
                self._ended.popitem(last=False)
            ending = asyncio.create_task(session.end())
            await wait_despite_cancellation([ending])
            ending.result()

    # The server

    async def start(self) -> None:
        """Start the server, if it is not running.

        Raises:
            OSError: If the port is in use.
        """
        async with self._starting:
            if self._runner is not None:
                return
            runner = web.AppRunner(
                self._make_app(),
                access_log=None,
                handler_cancellation=True,
                keepalive_timeout=75,
                max_field_size=MAX_HEADER_BYTES,
            )
            await runner.setup()
            try:
                site = web.TCPSite(runner, self.settings.host, self.settings.port, backlog=1024)
                await site.start()
            except BaseException:
                await runner.cleanup()
                raise
            host, port = runner.addresses[0][:2]
            shown = f"[{host}]" if ":" in host else host
            self._address = f"http://{shown}:{port}"
            self._runner = runner
            self._sweeper = asyncio.create_task(self._sweep(runner))

    async def open_socket(self) -> Path:
        """Listen on a Unix socket too, for agents without a network; return its path.

        Raises:
            OSError: If the server or the socket cannot be opened.
        """
        await self.start()
        async with self._starting:
            assert self._runner is not None
            folder = self._socket_folder or tempfile.TemporaryDirectory(prefix="agentrl-gateway-")
            path = Path(folder.name) / "gateway.sock"
            if self._socket_folder is None:
                await web.UnixSite(self._runner, path, backlog=1024).start()
                self._socket_folder = folder
            return path

    async def close(self) -> None:
        """Stop the server. Sessions that are open stay usable only for their `with` block's end."""
        runner, self._runner = self._runner, None
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        if runner is not None:
            await runner.cleanup()
        if self._socket_folder is not None:
            self._socket_folder.cleanup()
            self._socket_folder = None

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._greet])
        for path, dialect in DIALECTS.items():
            app.router.add_post(path, self._completion_handler(dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_routes(self._routes)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name}", self._show_model)
        app.router.add_post("/reward", self._take_reward)
        app.router.add_post("/v1/reward", self._take_reward)
        app.router.add_get("/health", self._show_health)
        return app

    @web.middleware
    async def _greet(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Mark the connection as one that has sent headers; answer unknown routes; count losses."""
        self._greeted.add(request.protocol)
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status in (404, 405):
                known = ", ".join([*DIALECTS, "/v1/models", "/reward"])
                message = f"no route {request.method} {request.path}; the gateway has {known}"
                raised = CallError(message, status=error.status, code="unknown_route")
                return _respond_error(_dialect_of(request), raised)
            raise
        except (asyncio.CancelledError, ConnectionError) as error:
            if _has_left(request):
                with suppress(CallError):
                    self._find_session(request).counts["lost_clients"] += 1
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response()  # the server drops it without a traceback
        finally:
            self._busy.discard(request.protocol)

    async def _sweep(self, runner: web.AppRunner) -> None:
        """Close connections that do not send their headers in time, and those above the limit."""
        arrived: dict[Any, float] = {}
        while runner.server is not None:
            now, connections = time.monotonic(), runner.server.connections
            self._greeted.intersection_update(connections)
            arrived = {one: arrived.get(one, now) for one in connections}
            excess = len(connections) - min(self.settings.max_connections, _file_limit() // 2)
            idle = [one for one in connections if one not in self._busy]
            # Those that sent nothing are closed first.
            for number, one in enumerate(sorted(idle, key=self._greeted.__contains__)):
                is_late = now - arrived[one] >= self.settings.header_timeout_s
                is_late = is_late and one not in self._greeted
                if one.transport is not None and (is_late or number < excess):
                    one.transport.abort()
            await asyncio.sleep(min(1.0, self.settings.header_timeout_s / 4))

    # Routes

    def _completion_handler(
        self, dialect: Dialect
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._find_session(request)
                with session.opened() as add_bytes:
                    body = await self._read(request, add_bytes)
                    call, digest = await session.read(partial(_read_call, dialect), body)
                    del body
                    pending = session.start(call, digest, request.headers)
                    with pending.serving():
                        if call.stream:
                            return await self._stream(request, dialect, pending, call)
                        reply = await pending.wait()
                        write = partial(_write_reply, dialect, reply, call)
                        response = await session.write(write, call)
                        await self._send(request, response)
                        pending.confirm()
                        return response
            except (ConnectionError, web.HTTPException):
                raise
            except Exception as error:  # noqa: BLE001 - an error costs the call, not the server
                return _respond_error(dialect, _as_call_error(error))

        return handle

    async def _stream(
        self, request: web.Request, dialect: Dialect, pending: PendingCall, call: ChatCall
    ) -> web.StreamResponse:
        """Send a reply as events, after the completion has ended; before that, comments."""
        waiting = asyncio.ensure_future(pending.wait())
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            # Errors of the first seconds get a status of their own.
            await asyncio.wait([waiting], timeout=self.settings.ping_interval_s)
            if waiting.done():
                response.headers.update(_headers(waiting.result()))
            await response.prepare(request)
            while not waiting.done():
                await response.write(b": waiting for the policy\n\n")
                await asyncio.wait([waiting], timeout=self.settings.ping_interval_s)
            try:
                write = partial(_write_events, dialect, waiting.result(), call)
                events = await self._find_session(request).write(write, call)
            except Exception as error:  # noqa: BLE001 - the status is sent, so it becomes an event
                refused = _as_call_error(error)
                await response.write(Event(dialect.write_error(refused), "error").encode())
                await response.write_eof()
                return response
            await self._send(request, response, events)
            pending.confirm()
            return response
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await waiting

    async def _send(
        self, request: web.Request, response: web.StreamResponse, pieces: Sequence[bytes] = ()
    ) -> None:
        """Send a response to its end now, so that a failure to deliver it is known.

        Raises:
            ConnectionError: If the client has left, or does not read.
        """
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                await response.prepare(request)
                for piece in pieces:
                    await response.write(piece)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        if _has_left(request):
            raise ConnectionResetError("the client has left")

    def _find_session(self, request: web.Request) -> GatewaySession:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = [key for key in (request.headers.get("x-api-key"), bearer) if key]
        for key in given:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._ended for key in given):
            raise CallError("the request of this key has ended", status=410, code="request_ended")
        raise CallError(
            "unknown key; expected the key of a running request, as `Authorization: Bearer KEY` "
            "or `x-api-key: KEY`",
            status=401,
            code="invalid_api_key",
        )

    async def _read(self, request: web.Request, add_bytes: Callable[[int], None]) -> bytes:
        """Read a body, in time and within the limits of one body and of its agent.

        Raises:
            CallError: If it is too long, too late, or not HTTP.
        """
        limit, body = self.settings.max_body_bytes, bytearray()
        declared = request.content_length or 0
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                while declared <= limit and (chunk := await request.content.readany()):
                    add_bytes(len(chunk))
                    body += chunk
                    declared = max(declared, len(body))
            if declared <= limit:
                return bytes(body)
            raise CallError(
                f"the body has more than {limit} bytes", status=413, code="body_too_large"
            )
        except (web.RequestPayloadError, http_exceptions.HttpProcessingError) as error:
            raise CallError(f"the body is not HTTP: {error}", code="invalid_request") from None
        except TimeoutError:
            raise CallError(
                f"the body did not arrive in {self.settings.body_timeout_s:g} seconds",
                status=408,
                code="body_timeout",
            ) from None

    async def _count_tokens(self, request: web.Request) -> web.Response:
        dialect = DIALECTS["/v1/messages"]
        try:
            session = self._find_session(request)
            with session.opened() as add_bytes:
                body = await self._read(request, add_bytes)
                call, _ = await session.read(partial(_read_call, dialect), body)
                return web.json_response({"input_tokens": await session.count_input_tokens(call)})
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:  # noqa: BLE001 - an error costs the call, not the server
            return _respond_error(dialect, _as_call_error(error))

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            self._find_session(request)
        except CallError as error:
            return _respond_error(_dialect_of(request), error)
        listed = [self._describe_model(self.settings.model_name)]
        ids = {"first_id": self.settings.model_name, "last_id": self.settings.model_name}
        return web.json_response({"object": "list", "data": listed, "has_more": False, **ids})

    async def _show_model(self, request: web.Request) -> web.Response:
        try:
            self._find_session(request)
        except CallError as error:
            return _respond_error(_dialect_of(request), error)
        return web.json_response(self._describe_model(request.match_info["name"]))

    def _describe_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "display_name": name,
            "owned_by": "agentrl",
        }

    async def _take_reward(self, request: web.Request) -> web.Response:
        try:
            session = self._find_session(request)
            with session.opened() as add_bytes:
                await session.report(await self._read(request, add_bytes))
        except CallError as error:
            return _respond_error(_dialect_of(request), error)
        return web.json_response({"reward": session.reported_reward})

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})


def _read_call(dialect: Dialect, body: bytes) -> tuple[ChatCall, bytes]:
    """Read a body; return its digest too."""
    call = replace(dialect.read(body), is_large=is_large(body))
    return call, blake2b(body, digest_size=16).digest()


def _write_reply(dialect: Dialect, reply: ChatReply, call: ChatCall) -> web.Response:
    written = dialect.write(reply, call)
    return web.json_response(written, dumps=dump_json, headers=_headers(reply))


def _write_events(dialect: Dialect, reply: ChatReply, call: ChatCall) -> list[bytes]:
    return [event.encode() for event in dialect.stream(reply, call)]


def _file_limit() -> int:
    """Return the most open files of the process, which its connections share with the run."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of a client on a route that all dialects share."""
    is_anthropic = "anthropic-version" in request.headers or request.path.startswith("/v1/messages")
    return DIALECTS["/v1/messages" if is_anthropic else "/v1/chat/completions"]


def _headers(reply: ChatReply) -> dict[str, str]:
    return {"x-agentrl-ignored": ", ".join(reply.unmet)} if reply.unmet else {}


def _as_call_error(error: Exception) -> CallError:
    """Return the error that a client gets; a defect is logged."""
    if isinstance(error, CallError):
        return error
    logger.error("a call of a client failed", exc_info=error)
    return CallError(f"{type(error).__name__}: {error}", status=500, code="internal_error")


def _respond_error(dialect: Dialect, error: CallError) -> web.Response:
    headers = {"x-should-retry": "true" if error.can_be_repeated else "false"}
    return web.json_response(dialect.write_error(error), status=error.status, headers=headers)


def _has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
