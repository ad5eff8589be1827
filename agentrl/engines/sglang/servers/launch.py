"""Start local SGLang servers and keep them running (`agentrl serve`)."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
import torch

from agentrl.engines.sglang.arguments import (
    CPU_ENVIRONMENT,
    DEVICES_VARIABLE,
    ENVIRONMENT,
    SGLangNeeds,
    has_accelerator,
    server_arguments,
)
from agentrl.engines.sglang.processes import kill, with_children
from agentrl.errors import ConfigError, EngineError

READY_TIMEOUT_S = 1800.0
"""Seconds from a server's start to its first answer: it may read hundreds of gigabytes."""
STEADY_S = 600.0
"""After so many seconds of running, a server's restarts are counted from zero."""
MAX_BACKOFF_S = 60.0
END_TIMEOUT_S = 20.0
_POLL_S = 0.5
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""After this time without an answer, the health check is repeated."""
_ALL_ADDRESSES = "0.0.0.0"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How many servers `agentrl serve` starts, and where."""

    num: int = 1
    host: str = "127.0.0.1"
    """The address of this machine on which they listen."""
    port: int | None = None
    """Of the first server; the others use the next ports. None: free ports."""
    max_restarts: int = 3
    """How often one server is restarted before all are ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How to start one server."""

    host: str
    port: int
    arguments: Mapping[str, Any]
    """Of SGLang's `ServerArgs`, without host and port."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables in addition to those of this process."""

    @property
    def address(self) -> str:
        """The address for other processes."""
        host = socket.gethostname() if self.host == _ALL_ADDRESSES else self.host
        return f"http://{host}:{self.port}"

    @property
    def local_address(self) -> str:
        """The address for this process."""
        host = "127.0.0.1" if self.host == _ALL_ADDRESSES else self.host
        return f"http://{host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command. Server arguments are sent to its standard input, which is private."""
        return [
            sys.executable,
            "-m",
            "agentrl.engines.sglang.processes",
            str(os.getpid()),
        ]

    @property
    def server_arguments(self) -> bytes:
        """SGLang's arguments as JSON; an `api_key` may be one of them."""
        arguments = dict(self.arguments) | {"host": self.host, "port": self.port}
        return json.dumps(arguments).encode()


def plan_servers(needs: SGLangNeeds, options: ServeOptions) -> list[ServerPlan]:
    """Assign a port and devices to each server.

    Raises:
        ConfigError: There are too few devices, or a port is in use.
        MissingExtraError: SGLang is not installed.
    """
    on_cpu = not has_accelerator()
    arguments = server_arguments(needs, on_cpu=on_cpu) | {"api_key": needs.api_key}
    shares = (
        itertools.repeat(dict(CPU_ENVIRONMENT)) if on_cpu else share_devices(arguments, options)
    )
    return [
        ServerPlan(
            host=options.host,
            port=port,
            arguments=arguments,
            environment=dict(ENVIRONMENT) | share,
        )
        for port, share in zip(choose_ports(options), shares, strict=False)
    ]


def share_devices(arguments: Mapping[str, Any], options: ServeOptions) -> list[dict[str, str]]:
    """Return the devices that each server sees, as environment variables.

    Raises:
        ConfigError: There are too few devices.
    """
    given = os.environ.get(DEVICES_VARIABLE)
    devices = given.split(",") if given else [f"{n}" for n in range(torch.cuda.device_count())]
    size = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    if options.num * size > len(devices):
        raise ConfigError(
            f"{options.num} servers of {size} devices each do not fit on {len(devices)} devices",
            key="rollout.engine.sglang.tp_size",
            expected=f"a smaller one, or --num {len(devices) // size}",
        )
    return [
        {DEVICES_VARIABLE: ",".join(devices[index * size : (index + 1) * size])}
        for index in range(options.num)
    ]


def choose_ports(options: ServeOptions) -> list[int]:
    """Choose free ports, or check the given ones.

    `LocalServer.start` reserves its port until the server listens there.

    Raises:
        ConfigError: A port is in use, or the host is not this machine.
    """
    wanted: Iterable[int] = [0] * options.num
    if options.port is not None:
        wanted = range(options.port, options.port + options.num)
    with contextlib.ExitStack() as stack:
        # All stay bound until the last is chosen, so that none is chosen twice.
        bound = [stack.enter_context(_bind(options.host, port)) for port in wanted]
        return [one.getsockname()[1] for one in bound]


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen; it reserves its port.

    Linux gives the port to no process that asks for any free one, and to no connection. SGLang can
    still bind it, because both sockets have SO_REUSEADDR and this one does not listen.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"port {port} of {host} cannot be used: {error.strerror or error}",
            expected="another --port, or none for free ports; a --host of this machine",
        ) from None
    return bound


class LocalServer:
    """The process of one server.

    Args:
        plan: How to start it.
        log_path: The file to which its output is appended; None: this process's standard error.
        ready_timeout_s: Seconds from its start to its first answer.
    """

    def __init__(
        self,
        plan: ServerPlan,
        *,
        log_path: Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.plan = plan
        self._log_path = log_path
        self._ready_timeout_s = ready_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._reserved: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start it and wait until it is healthy. Its port is reserved for it until `end`.

        Raises:
            ConfigError: Another process has its port.
            EngineError: It ends before, or takes too long.
        """
        if self._reserved is None:
            self._reserved = _bind(self.plan.host, self.plan.port)
        with contextlib.ExitStack() as stack:
            log: Any = (
                None if self._log_path is None else stack.enter_context(self._log_path.open("ab"))
            )
            self._process = await asyncio.create_subprocess_exec(
                *self.plan.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr.fileno() if log is None else log,
                stderr=log,
                env=dict(os.environ) | dict(self.plan.environment),
                start_new_session=True,  # only the supervisor reacts to Ctrl-C
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self.plan.server_arguments)
        self._process.stdin.close()
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(self._ready_timeout_s), aiohttp.ClientSession() as session:
                while not await self._is_healthy(session):
                    await asyncio.wait([ended], timeout=_POLL_S)
                    self._raise_if_ended()
        except TimeoutError:
            raise EngineError(
                f"the server at {self.plan.address} was not ready after {self._ready_timeout_s:g} s"
            ) from None
        finally:
            ended.cancel()

    async def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        assert self._process is not None, "start() comes first"
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the process and its descendants, if it has not ended, and free its port."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if self._process is None or self._process.returncode is not None:
            return
        processes = with_children([self._process.pid])
        kill(processes)
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, processes[1:], timeout=END_TIMEOUT_S)

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        if not self._is_listening():
            return False  # what answers at its port is another process
        try:
            async with session.get(
                f"{self.plan.local_address}/health", timeout=_HEALTH_TIMEOUT
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _is_listening(self) -> bool:
        assert self._process is not None
        for process in with_children([self._process.pid]):
            with contextlib.suppress(psutil.Error):
                for bound in process.net_connections("tcp"):
                    if bound.status == psutil.CONN_LISTEN and bound.laddr[1:] == (self.plan.port,):
                        return True
        return False

    def _raise_if_ended(self) -> None:
        status = self._process.returncode if self._process is not None else None
        if status is not None:
            raise EngineError(
                f"the server at {self.plan.address} did not start: its process ended with {status}",
                expected="the cause is in its output above; rollout.engine.sglang.log_level=info "
                "shows more",
            )


class LocalServers:
    """Starts servers, and restarts those that die.

    The end of the `async with` block ends all of them. If this process is killed, the kernel ends
    them.

    Args:
        plans: How to start each.
        say: Gets a message about each event.
        max_restarts: How often one server is restarted.

    Example:
        >>> async with LocalServers(plans, say=print) as servers:
        ...     await servers.watch()
    """

    def __init__(self, plans: Sequence[ServerPlan], *, say: Say, max_restarts: int = 3) -> None:
        self.servers = [LocalServer(plan) for plan in plans]
        self._say = say
        self._max_restarts = max_restarts

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(server.start())
        except BaseException as error:
            await self._end_all()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end_all()

    async def watch(self) -> None:
        """Keep all of them running until one fails.

        Raises:
            EngineError: A server has died too often, or does not restart.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(self._keep(server))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, server: LocalServer) -> None:
        num_restarts = 0
        while True:
            began = time.monotonic()
            status = await server.wait()
            if time.monotonic() - began > STEADY_S:
                num_restarts = 0
            if num_restarts >= self._max_restarts:
                raise EngineError(
                    f"the server at {server.plan.address} ended with {status}",
                    restarts=num_restarts,
                    expected="the cause is in its output above",
                )
            num_restarts += 1
            await self._restart(server, status, num_restarts)

    async def _restart(self, server: LocalServer, status: int, attempt: int) -> None:
        delay_s = min(2.0 ** (attempt - 1), MAX_BACKOFF_S)
        self._say(
            f"the server at {server.plan.address} ended with {status}; it is restarted in "
            f"{delay_s:g} s ({attempt} of {self._max_restarts})"
        )
        await asyncio.sleep(delay_s)
        await server.start()
        self._say(
            f"the server at {server.plan.address} is ready again, with the model's own weights"
        )

    async def _end_all(self) -> None:
        await asyncio.gather(*(server.end() for server in self.servers))


async def serve(plans: Sequence[ServerPlan], *, say: Say, max_restarts: int) -> None:
    """Start servers, report their addresses, and keep them running until this is cancelled.

    Raises:
        EngineError: A server does not start, or has died too often.
    """
    say(f"starting {len(plans)} SGLang server{'s' * (len(plans) > 1)}: this takes a minute")
    async with LocalServers(plans, say=say, max_restarts=max_restarts) as servers:
        say(run_file_keys(plans))
        await servers.watch()


def run_file_keys(plans: Sequence[ServerPlan]) -> str:
    """Return the keys with which a run uses the servers."""
    addresses = ",".join(plan.address for plan in plans)
    return (
        f"rollout.engine.name=sglang_server 'rollout.engine.sglang_server.addresses=[{addresses}]'"
    )
