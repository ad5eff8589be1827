"""The HTTP client of one SGLang server."""

import asyncio
import base64
import contextlib
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.media import as_json
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION
from agentrl.errors import EngineError

_MAX_MESSAGE_CHARS = 300
"""Characters of a server's error message that are shown."""
_STILL_OPEN = "already open"
"""In the answer of a server that should begin an update during another one."""
_JSON_HEADERS = {"Content-Type": "application/json"}


class ServerFailedError(EngineError):
    """A server could not do a request; another server, or the same one later, may succeed."""


class ServerLostError(ServerFailedError):
    """A server has ended: none of its running calls will be answered."""


class ServerLateError(ServerFailedError):
    """A server has not answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a server reports about itself."""

    start_id: str
    """Differs for each process at the address: a new process has the model's own weights."""
    weight_version: str
    """The name of its weights."""
    max_input_tokens: int
    """Most tokens of one input."""
    tp_size: int
    """Its tensor-parallel ranks."""
    can_sleep: bool
    """Whether it can release its memory."""
    has_tower: bool = False
    """Whether its model reads images."""
    num_calls: int = 0
    """Calls of all its clients, running and waiting; 0 if it does not report them."""

    @property
    def is_half_updated(self) -> bool:
        """Whether an update of its weights has begun and not ended."""
        return self.weight_version == UNFIT_VERSION


class ServerClient:
    """A `Backend` at an address.

    Args:
        address: Such as `http://127.0.0.1:30000`.
        session: Must open a connection for each request: a server may close a kept connection just
            when it is used again, which looks like a lost server.
        settings: Timeouts.
        api_key: The server's own; None: that of the settings.
    """

    def __init__(
        self,
        address: str,
        session: aiohttp.ClientSession,
        settings: SGLangServerConfig,
        api_key: str | None = None,
    ) -> None:
        self.name = address
        self._session = session
        self._settings = settings
        key = api_key or settings.api_key
        self._headers = _JSON_HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        self._aborts: set[asyncio.Task[None]] = set()
        self._has_answered = False

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Sample one completion (see `Backend.generate`).

        Raises:
            ServerFailedError: Another server may succeed.
            EngineError: The server refuses the call.
        """
        try:
            answer = await self._post("generate", as_json(fields))
        except (asyncio.CancelledError, ServerLateError):
            # Abort without a wait; the server itself would notice seconds later.
            task = asyncio.get_running_loop().create_task(self.abort(fields["rid"]))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        if not isinstance(answer, dict):
            raise ServerFailedError(f"{self.name} returned no completion: {_short(answer)}")
        return answer

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Send any other request (see `Backend.control`)."""
        try:
            await self._control(request, fields)
        except EngineError as error:
            if request != "begin_weight_update" or _STILL_OPEN not in str(error):
                raise
            await self._control("end_weight_update", {})  # of a trainer that was killed during it
            await self._control(request, fields)

    async def _control(self, request: str, fields: JsonFields | None) -> None:
        answer = await self._post(request, fields or {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.name} could not {request}: {_short(answer.get('message'))}")

    async def check_health(self) -> ServerState:
        """Return the server's state after it has sampled a token, which its health check does.

        A server whose update is incomplete cannot sample before the next update: its state is
        returned without the check.

        Raises:
            EngineError: The server is not healthy.
        """
        state = await self.read_state()
        if state.is_half_updated:
            return state
        try:
            await self._get("health")
        except ServerLateError:
            # This process may have been too busy to read an answer that has arrived.
            await self._get("health")
        return await self.read_state()

    async def read_state(self) -> ServerState:
        """Query the server's state; no token is sampled.

        Raises:
            EngineError: It does not answer.
        """
        model, server = await self._get("model_info"), await self._get("server_info")
        num_calls = await self._count_calls()
        try:
            return ServerState(
                start_id=json.dumps(server["startup_time"], sort_keys=True),
                weight_version=model["weight_version"],
                max_input_tokens=server["max_req_input_len"],
                tp_size=server["tp_size"],
                can_sleep=server["device"] != "cpu" and server["enable_memory_saver"],
                has_tower=bool(model.get("has_image_understanding")),
                num_calls=num_calls,
            )
        except (KeyError, TypeError) as error:
            raise ServerFailedError(
                f"{self.name} does not answer like a known SGLang server: {error!r}"
            ) from error

    async def _count_calls(self) -> int:
        try:
            ranks = (await self._get("v1/loads?include=core"))["loads"]
            return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)
        except ServerFailedError:
            raise
        except (EngineError, KeyError, TypeError):
            return 0  # a version that does not report its load

    async def close(self) -> None:
        """Wait until the server has received the aborts of cancelled calls."""
        await asyncio.gather(*self._aborts, return_exceptions=True)

    async def abort(self, rid: str) -> None:
        """End a call with what it has sampled. Errors are ignored."""
        with contextlib.suppress(EngineError):
            await self._send("abort_request", {"rid": rid}, self._settings.health_timeout_s)

    async def _get(self, route: str) -> Any:
        return await self._send(route, None, self._settings.health_timeout_s)

    async def _post(self, route: str, fields: JsonFields) -> Any:
        return await self._send(route, fields, self._settings.request_timeout_s)

    async def _send(self, route: str, fields: JsonFields | None, timeout_s: float) -> Any:
        """Send one request and read its whole answer.

        Args:
            route: Of the server.
            fields: Sent as JSON; None: a request without a body.
            timeout_s: Seconds until the answer is late.

        Raises:
            ServerLateError: The answer is late.
            ServerLostError: No connection is possible, or it breaks.
            EngineError: See `_read`.
        """
        method = "GET" if fields is None else "POST"
        data = None if fields is None else json.dumps(fields, default=_to_json)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, f"{self.name}/{route}", data=data, headers=self._headers
                ) as answer,
            ):
                body = await answer.read()
                self._has_answered = True
        except aiohttp.ClientError as error:
            reason = "has ended" if self._has_answered else "does not answer"
            raise ServerLostError(f"{self.name} {reason}: {_describe(error)}") from error
        except TimeoutError:
            raise ServerLateError(
                f"{self.name} has not answered /{route} for {timeout_s:g} s"
            ) from None
        return self._read(route, answer.status, body)

    def _read(self, route: str, status: int, body: bytes) -> Any:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerFailedError(f"{self.name} failed at /{route} ({status}): {_short(body)}")
        if status == HTTPStatus.UNAUTHORIZED:
            raise EngineError(
                f"{self.name} refused the key of this run",
                key="rollout.engine.sglang_server.api_key",
                expected="the key that the server was started with (its --api-key)",
            )
        if status >= HTTPStatus.BAD_REQUEST:
            raise EngineError(f"{self.name} refused /{route} ({status}): {_short(body)}")
        try:
            return json.loads(body) if body.startswith((b"{", b"[")) else None
        except ValueError as error:
            raise ServerFailedError(
                f"{self.name} answered /{route} with invalid JSON: {error}"
            ) from None


def _to_json(value: Any) -> str:
    """Return bytes as base64, as SGLang reads them."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
    return base64.b64encode(value).decode()


def _describe(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror})"
    return str(error) or type(error).__name__


def _short(message: Any) -> str:
    """Return the start of a server's error message, without its usual JSON envelope."""
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["error"]["message"])
    return text[:_MAX_MESSAGE_CHARS] or "no message"
