"""`agentrl gateway`: the policy of a run file, for agents that are started by hand."""

import asyncio
import errno
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from aiohttp import web

from agentrl.agent_loops.gateway import Gateway, GatewaySession, GatewaySettings
from agentrl.commands.rollout import load_engine
from agentrl.commands.run_file import RunFile
from agentrl.commands.train import open_run
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.rollout.failures import describe_failure, find_fault
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollouts.files import to_line
from agentrl.trainer.rollouts.pictures import PictureCollector, write_pictures
from agentrl.trainer.setup.engine_factory import announce_start
from agentrl.trainer.setup.preflight import claim_file, claim_prepared
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model
from agentrl.workers.rng import seed_everything

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The options of `agentrl gateway`."""

    out: Path | None = None
    """File to which each session is appended when it ends; None: `sessions.jsonl` in the run's
    folder."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""


def gateway_from_file(file: RunFile, options: GatewayOptions, *, say: Say) -> None:
    """Serve the policy until SIGINT (Ctrl-C) or SIGTERM, then end and save the open sessions.

    Raises:
        AgentRLError: if the address is in use, or the model, its template or the engine cannot be
            used.
        OSError: if the file of the sessions cannot be written.
    """
    check_address(options)
    with open_run(file) as run:
        out = options.out or Path(run.config.trainer.default_local_dir) / "sessions.jsonl"
        claim_file(out, key="--out")
        claim_prepared(run.config)
        config, now = run.config, datetime.now()
        prepare_run(config, run.world, run.run_logger, run.plugins.tools, now=now)
        seed_everything(config.trainer.seed)
        probed = probe_model(config, run.plugins, now=now)
        setup = make_rollout_setup(config, run.plugins, probed, serves_agents=True)
        run.run_logger.info(*announce_start(config))
        engine = load_engine(config, setup, run.world)

        async def serve() -> None:
            manager = make_manager(config, setup, engine)
            try:
                await _serve(config, manager, options, out, say)
            finally:
                await run.plugins.shutdown()
                await engine.close()

        asyncio.run(serve())


def check_address(options: GatewayOptions) -> None:
    """Check that a server can listen on the address, before anything is prepared or loaded.

    Raises:
        ConfigError: If the address is in use, or is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            trial.bind(address)
    except OSError as error:
        raise _address_error(error, options) from error


def _address_error(error: OSError, options: GatewayOptions) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {options.port} of {options.host} is in use by another program",
            key="--port",
            expected="another port, or 0 for a free one",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"this user may not listen on port {options.port}",
            key="--port",
            expected="a port from 1024 on, or 0 for a free one",
        )
    return ConfigError(
        f"the gateway cannot listen on {options.host!r}: {error.strerror or error}",
        key="--host",
        expected="an address of this machine: 127.0.0.1, or 0.0.0.0 for agents on other machines",
    )


async def _serve(
    config: RunConfig, manager: RolloutManager, options: GatewayOptions, out: Path, say: Say
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with OpenSessions(config, manager, options, out) as sessions:
            for line in sessions.describe(await sessions.open()):
                say(line)
            await stop.wait()
        say(f"saved {sessions.num_saved} sessions to {out}")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class OpenSessions:
    """A gateway whose sessions are opened and ended by HTTP, and saved when they end.

    Args:
        config: The run.
        manager: Has the budgets, the sampling parameters and the context of requests.
        options: Has the address.
        out: File to which each session with a call is appended.
    """

    def __init__(
        self, config: RunConfig, manager: RolloutManager, options: GatewayOptions, out: Path
    ) -> None:
        self.num_saved = 0
        self.admin_key = f"agentrl-admin-{secrets.token_urlsafe(24)}"
        self._config = config
        self._manager = manager
        self._options = options
        self._out = out
        self._pictures = PictureCollector()
        self._num_opened = 0
        self._open: dict[str, tuple[AsyncRolloutRequest, GatewaySession, AsyncExitStack]] = {}
        routes = [
            web.post("/sessions", self._post),
            web.delete("/sessions/{key}", self._delete),
        ]
        keys = config.rollout.agent.gateway
        settings = GatewaySettings.of(keys, host=options.host, port=options.port)
        self._gateway = Gateway(settings, routes=routes)

    async def __aenter__(self) -> "OpenSessions":
        try:
            await self._gateway.start()
        except OSError as error:  # another program took the port after `check_address`
            raise _address_error(error, self._options) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for key in list(self._open):
                await self.end(key)
        finally:
            await self._gateway.close()

    def describe(self, first: GatewaySession) -> list[str]:
        """Return what a user has to know to start an agent."""
        return [
            f"OpenAI base URL: {first.base_url}",
            f"Anthropic base URL: {first.anthropic_base_url}",
            f"key of the first session: {first.key}",
            f"admin key: {self.admin_key}",
            "another session: "
            f"curl -X POST -H 'Authorization: Bearer ADMIN_KEY' {self._gateway.address}/sessions",
        ]

    async def open(self) -> GatewaySession:
        """Open a session for one request."""
        number = self._num_opened
        self._num_opened += 1
        name = f"gateway-{number}"
        request = AsyncRolloutRequest(
            request_id=name,
            uid=name,
            messages=[],
            sampling=self._manager.train_plan().sampling,
            budgets=self._manager.budgets,
            seed=draw_seed(f"{self._config.rollout.seed}:{name}"),
        )
        stack = AsyncExitStack()
        serving = self._gateway.session(request, self._manager.context)
        session = await stack.enter_async_context(serving)
        self._open[session.key] = request, session, stack
        return session

    async def end(self, key: str) -> AsyncRolloutRequest:
        """End a session, and save its request if the policy was called.

        Raises:
            KeyError: If no session has this key.
        """
        request, session, stack = self._open.pop(key)
        await stack.aclose()
        request.agent_reward = request.reward = session.reported_reward
        if session.error is not None:
            fault = find_fault(session.error, request.state)
            turn = len(request.turns)
            request.finish(StopReason.FAILED, describe_failure(session.error, fault, turn=turn))
        else:
            request.finish(session.stop_reason)
        if request.num_prompt_tokens:
            line = to_line(request, 0, self._pictures, reward=self._config.reward)
            write_pictures(self._out.parent, line.pictures)
            with self._out.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line.text)
            self.num_saved += 1
        return request

    # Routes

    async def _post(self, http: web.Request) -> web.Response:
        if (refused := self._refuse(http)) is not None:
            return refused
        session = await self.open()
        body = {"key": session.key, "base_url": session.base_url}
        body["anthropic_base_url"] = session.anthropic_base_url
        return web.json_response(body, status=201)

    async def _delete(self, http: web.Request) -> web.Response:
        if (refused := self._refuse(http)) is not None:
            return refused
        try:
            request = await self.end(http.match_info["key"])
        except KeyError:
            return _error("no open session has this key", status=404)
        return web.json_response(
            {
                "request_id": request.request_id,
                "stop_reason": request.stop_reason,
                "reward": request.reward,
                "num_sequences": len(request.sequences) if request.num_prompt_tokens else 0,
            }
        )

    def _refuse(self, http: web.Request) -> web.Response | None:
        given = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if secrets.compare_digest(given.encode(), self.admin_key.encode()):
            return None
        return _error("expected the admin key, as `Authorization: Bearer KEY`", status=401)


def _error(message: str, *, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
