"""One SGLang server behind an address, asked over HTTP."""

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
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION
from agentrl.errors import EngineError

_SAID_CHARS = 300
"""So much of what a server says of a failure is shown."""
_STILL_OPEN = "already open"
"""Said by a server that is asked to begin an update in the middle of another."""


class ServerFailedError(EngineError):
    """A server that could not do what was asked; another one, or the same one later, may."""


class ServerLostError(ServerFailedError):
    """A server that is gone: nothing that runs on it will be answered."""


class ServerLateError(ServerFailedError):
    """A server that has not answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a server says of itself."""

    birth: str
    """Another one for each process that has answered at the address: weights are its own."""
    weight_version: str
    """What its weights are called."""
    max_input_tokens: int
    """Most tokens of one input."""
    tp_size: int
    """Its tensor-parallel ranks."""
    can_sleep: bool
    """Whether it can give memory back and take it again."""

    @property
    def is_half_updated(self) -> bool:
        """Whether an update of its weights was begun that has not gone through whole."""
        return self.weight_version == UNFIT_VERSION


class SGLangServer:
    """A `Backend` behind an address.

    Args:
        address: Such as `http://127.0.0.1:30000`.
        session: That opens a connection for each request: one that was kept open may have been
            closed by the server just when it is used again, which looks like a lost server.
        settings: How long what may take.
    """

    def __init__(
        self, address: str, session: aiohttp.ClientSession, settings: SGLangServerConfig
    ) -> None:
        self.name = address
        self._session = session
        self._settings = settings
        self._aborts: set[asyncio.Task[None]] = set()
        self._has_answered = False

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion (see `Backend.generate`).

        Raises:
            ServerFailedError: where another server may do.
            EngineError: where the server refuses the call.
        """
        try:
            answer = await self._post("generate", fields)
        except (asyncio.CancelledError, ServerLateError):
            self._abort_later(fields["rid"])
            raise
        if not isinstance(answer, dict):
            raise ServerFailedError(f"{self.name} returned no completion: {_short(answer)}")
        return answer

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Ask for anything else (see `Backend.control`)."""
        try:
            await self._control(request, fields)
        except EngineError as error:
            if request != "begin_weight_update" or _STILL_OPEN not in str(error):
                raise
            await self._control("end_weight_update", {})  # of somebody who was killed in it
            await self._control(request, fields)

    async def _control(self, request: str, fields: JsonFields | None) -> None:
        answer = await self._post(request, fields or {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.name} could not {request}: {_short(answer.get('message'))}")

    async def look(self) -> ServerState:
        """Have the server sample a token, where it does not do so anyway, and tell its state.

        One whose trainer was killed in the middle of an update samples nothing until the next one:
        it tells its state alone.

        Raises:
            EngineError: where it is not well.
        """
        state = await self.read_state()
        if state.is_half_updated:
            return state
        try:
            await self._get("health")
        except ServerLateError:
            # Its answer may lie here unread: this process was busy, or its loop stood still.
            await self._get("health")
        return await self.read_state()

    async def read_state(self) -> ServerState:
        """Ask the server for its state; nothing is sampled.

        Raises:
            EngineError: where it does not tell.
        """
        model, server = await self._get("model_info"), await self._get("server_info")
        try:
            return ServerState(
                birth=json.dumps(server["startup_time"], sort_keys=True),
                weight_version=model["weight_version"],
                max_input_tokens=server["max_req_input_len"],
                tp_size=server["tp_size"],
                can_sleep=server["device"] != "cpu" and server["enable_memory_saver"],
            )
        except (KeyError, TypeError) as error:
            raise ServerFailedError(
                f"{self.name} answers as no SGLang server that is known here: {error!r}"
            ) from error

    async def close(self) -> None:
        """Wait until the server has heard what is no longer wanted of it."""
        await asyncio.gather(*self._aborts, return_exceptions=True)

    async def abort(self, rid: str) -> None:
        """Have a call end with what it has sampled; nothing is said where the server is gone."""
        with contextlib.suppress(EngineError):
            await self._send(_Asked("abort_request", {"rid": rid}), self._settings.health_timeout_s)

    def _abort_later(self, rid: str) -> None:
        """Tell the server that nobody waits any more; it notices by itself, some seconds later."""
        task = asyncio.get_running_loop().create_task(self.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _get(self, route: str) -> Any:
        return await self._send(_Asked(route), self._settings.health_timeout_s)

    async def _post(self, route: str, fields: JsonFields) -> Any:
        return await self._send(_Asked(route, fields), self._settings.request_timeout_s)

    async def _send(self, asked: "_Asked", timeout_s: float) -> Any:
        """Send one request and read its answer whole.

        Raises:
            ServerLateError: after so many seconds.
            ServerLostError: where the connection cannot be had, or breaks.
            EngineError: see `_read`.
        """
        try:
            async with asyncio.timeout(timeout_s), asked.send(self._session, self.name) as answer:
                body = await answer.read()
                self._has_answered = True
        except aiohttp.ClientError as error:
            what = "is gone" if self._has_answered else "does not answer"
            raise ServerLostError(f"{self.name} {what}: {_broken(error)}") from error
        except TimeoutError:
            raise ServerLateError(
                f"{self.name} has not answered /{asked.route} for {timeout_s:g} s"
            ) from None
        return self._read(asked.route, answer.status, body)

    def _read(self, route: str, status: int, body: bytes) -> Any:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerFailedError(f"{self.name} failed at /{route} ({status}): {_short(body)}")
        if status >= HTTPStatus.BAD_REQUEST:
            raise EngineError(f"{self.name} refused /{route} ({status}): {_short(body)}")
        try:
            return json.loads(body) if body.startswith((b"{", b"[")) else None
        except ValueError as error:
            raise ServerFailedError(
                f"{self.name} answered /{route} with no JSON: {error}"
            ) from None


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request."""

    route: str
    fields: JsonFields | None = None
    """None: it asks for something that has no fields."""

    def send(self, session: aiohttp.ClientSession, address: str) -> Any:
        """Send it."""
        url = f"{address}/{self.route}"
        if self.fields is None:
            return session.get(url)
        return session.post(url, data=json.dumps(self.fields, default=_in_json), headers=_IS_JSON)


_IS_JSON = {"Content-Type": "application/json"}


def _in_json(value: Any) -> str:
    """Put what JSON has no form for into one: SGLang reads bytes as base64."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} goes over no wire")
    return base64.b64encode(value).decode()


def _broken(error: aiohttp.ClientError) -> str:
    """Why a connection is none."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror})"
    return str(error) or type(error).__name__


def _short(said: Any) -> str:
    """What a server says of a failure, without its envelope where it has the usual one."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["error"]["message"])
    return text[:_SAID_CHARS] or "it says nothing"
