"""Servers that speak SGLang's routes, in this process, and can be made to fail."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCAB = 90


def next_token(ids: Sequence[int]) -> int:
    """What every fake server samples behind `ids`."""
    return (31 * sum(ids) + 7 * len(ids)) % VOCAB


def expected_ids(ids: Sequence[int], number: int) -> list[int]:
    """What any servers between them sample behind `ids`, if none is lost or sampled twice."""
    grown = list(ids)
    for _ in range(number):
        grown.append(next_token(grown))
    return grown[len(ids) :]


@dataclass(eq=False)
class FakeSGLang:
    """One server."""

    device: str = "cpu"
    max_input: int = 1000
    stops_after: int | None = None
    """Ends a call behind so many tokens by a rule of its own, as at the model's end of text."""
    failing: dict[str, int] = field(default_factory=dict[str, int])
    """Routes that answer with a status instead."""
    hanging: set[str] = field(default_factory=set[str])
    """Routes that do not answer."""
    asked: list[tuple[str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, dict[str, Any]]]
    )
    """Routes and fields, in order."""
    on_generate: Callable[[dict[str, Any]], None] | None = None
    is_holding: bool = False
    """Whether calls sample two tokens and then wait, for `release_all` or an abort."""
    version: str = "0"
    num_births: int = 0
    is_paused: bool = False
    has_open_update: bool = False
    """Whether it is in the middle of an update, and refuses to begin another."""
    port: int = 0
    host: str = "127.0.0.1"
    first_version: str = "0"
    """The version of its weights when it starts."""
    api_key: str | None = None
    """Needed at every route but the health check's."""
    seconds_per_call: float = 0.0
    num_running: int = 0

    async def start(self) -> None:
        """Answer at a free port, or at the one of before."""
        self.num_births += 1
        self.version = self.first_version
        self._waiting: dict[str, asyncio.Future[str]] = {}
        app = web.Application()
        app.add_routes([web.route("*", "/{route:.+}", self._answer)])
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        self._socket = socket.create_server((self.host, self.port), backlog=128)
        await web.SockSite(self._runner, self._socket).start()
        self.port = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def kill(self) -> None:
        """Be gone, with every connection reset. May be called twice."""
        server = self._runner.server
        if server is None:
            return
        # asyncio leaks a connection that it has accepted and not yet attached when a server closes.
        asyncio.get_running_loop().remove_reader(self._socket)
        await asyncio.sleep(0)
        for _ in range(2):  # a connection may be accepted meanwhile, from another thread
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            await asyncio.sleep(0.01)

    def release_all(self) -> None:
        """Let the calls that wait go on."""
        self.is_holding = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result("go on")

    def routes(self) -> list[str]:
        """What was asked besides looks and calls, in order."""
        looks = ("health", "model_info", "server_info", "v1/loads", "generate")
        return [route for route, _ in self.asked if route not in looks]

    def calls(self) -> list[dict[str, Any]]:
        """The calls that came."""
        return [fields for route, fields in self.asked if route == "generate"]

    @property
    def num_waiting(self) -> int:
        """Calls that are held."""
        return len(self._waiting)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        route = request.match_info["route"]
        fields = await request.json() if request.can_read_body else {}
        self.asked.append((route, fields))
        bearer = request.headers.get("Authorization")
        if self.api_key is not None and route != "health" and bearer != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if route in self.hanging or (route == "health" and self.is_paused):
            await asyncio.sleep(60)
        if route in self.failing:
            return web.json_response(
                {"error": {"message": f"no {route} today"}}, status=self.failing[route]
            )
        return await self._serve(route, fields)

    async def _serve(self, route: str, fields: dict[str, Any]) -> web.Response:
        match route:
            case "model_info":
                return web.json_response({"weight_version": self.version})
            case "server_info":
                return web.json_response(self._info())
            case "v1/loads":
                load = {"num_running_reqs": self.num_running, "num_waiting_reqs": 0}
                return web.json_response({"loads": [load]})
            case "generate":
                self.num_running += 1
                try:
                    await asyncio.sleep(self.seconds_per_call)
                    return web.json_response(await self._generate(fields))
                finally:
                    self.num_running -= 1
            case "abort_request":
                for rid, waiting in self._waiting.items():
                    if rid == fields["rid"] and not waiting.done():
                        waiting.set_result("abort")
            case "update_weight_version":
                self.version = fields["new_version"]
            case "begin_weight_update" if self.has_open_update:
                error = {"success": False, "message": "a session is already open"}
                return web.json_response(error, status=400)
            case "begin_weight_update" | "end_weight_update":
                self.has_open_update = route == "begin_weight_update"
            case "pause_generation" | "continue_generation":
                self.is_paused = route == "pause_generation"
            case _:
                pass
        return web.json_response({"success": True, "message": ""})

    def _info(self) -> dict[str, Any]:
        return {
            "startup_time": {"birth": self.num_births},
            "max_req_input_len": self.max_input,
            "tp_size": 1,
            "device": self.device,
            "enable_memory_saver": self.device != "cpu",
        }

    async def _generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self.on_generate is not None:
            self.on_generate(fields)
        number, kind = fields["sampling_params"]["max_new_tokens"], "length"
        if self.stops_after is not None and self.stops_after < number:
            number, kind = self.stops_after, "stop"
        if self.is_holding and await self._wait(fields["rid"]) == "abort":
            number, kind = min(number, 2), "abort"
        ids = expected_ids(fields["input_ids"], number)
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": kind},
                "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
                "weight_version": self.version,
                "cached_tokens": 0,
            },
        }

    async def _wait(self, rid: str) -> str:
        self._waiting[rid] = asyncio.get_running_loop().create_future()
        try:
            return await self._waiting[rid]
        finally:
            del self._waiting[rid]


async def until(condition: Callable[[], object], *, seconds: float = 5.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of somebody else's, who tells nobody
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(*servers: FakeSGLang) -> AsyncIterator[None]:
    """Start servers, and end them."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.kill()
