"""Local SGLang servers, started and kept running: what `agentrl serve` does."""

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
from typing import Any, Self

import aiohttp
import psutil
import torch

from agentrl.engines.sglang.arguments import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    SGLangNeeds,
    has_accelerator,
    server_arguments,
)
from agentrl.errors import ConfigError, EngineError

READY_TIMEOUT_S = 1800.0
"""Seconds from a server's start to its first answer: weights of hundreds of gigabytes are read."""
STEADY_S = 600.0
"""A server that ran for so long has its restarts forgiven."""
LONGEST_BACKOFF_S = 60.0
END_TIMEOUT_S = 20.0
_POLL_S = 0.5
_LOOK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""A server that has not said within this that it is well is asked again."""
_DEVICES = "CUDA_VISIBLE_DEVICES"
_EVERYWHERE = "0.0.0.0"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How many servers `agentrl serve` starts, and where."""

    num: int = 1
    host: str = "127.0.0.1"
    """The address of this machine that they listen at."""
    port: int | None = None
    """Of the first; the others follow it. None: free ones."""
    max_restarts: int = 3
    """How often one server is started again, before all are ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server that is to run."""

    host: str
    port: int
    arguments: Mapping[str, Any]
    """Of SGLang's `ServerArgs`, without host and port."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that it sees besides those of this process."""

    @property
    def address(self) -> str:
        """Where the others reach it."""
        host = socket.gethostname() if self.host == _EVERYWHERE else self.host
        return f"http://{host}:{self.port}"

    @property
    def local_address(self) -> str:
        """Where this process reaches it."""
        host = "127.0.0.1" if self.host == _EVERYWHERE else self.host
        return f"http://{host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """What is run; its arguments come by its standard input, for every user sees these."""
        return [
            sys.executable,
            "-m",
            "agentrl.engines.sglang.servers.server_process",
            str(os.getpid()),
        ]

    @property
    def server_arguments(self) -> bytes:
        """SGLang's arguments as JSON: an `api_key` may be among them."""
        arguments = dict(self.arguments) | {"host": self.host, "port": self.port}
        return json.dumps(arguments).encode()


def plan_servers(needs: SGLangNeeds, options: ServeOptions) -> list[ServerPlan]:
    """Give each server a port, and devices of its own.

    Raises:
        ConfigError: where there are too few devices or a port is taken.
        MissingExtraError: where SGLang is not installed.
    """
    on_cpu = not has_accelerator()
    arguments = server_arguments(needs, on_cpu=on_cpu)
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
    """Say which devices each server sees.

    Raises:
        ConfigError: where there are too few.
    """
    given = os.environ.get(_DEVICES)
    devices = given.split(",") if given else [f"{n}" for n in range(torch.cuda.device_count())]
    size = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    if options.num * size > len(devices):
        raise ConfigError(
            f"{options.num} servers of {size} devices each do not fit on {len(devices)} devices",
            key="rollout.engine.sglang.tp_size",
            expected=f"a smaller one, or --num {len(devices) // size}",
        )
    return [
        {_DEVICES: ",".join(devices[place * size : (place + 1) * size])}
        for place in range(options.num)
    ]


def choose_ports(options: ServeOptions) -> list[int]:
    """Choose free ports, or check those that are given.

    Raises:
        ConfigError: for one that is taken, or a host that is not this machine's.
    """
    wanted: Iterable[int] = [0] * options.num
    if options.port is not None:
        wanted = range(options.port, options.port + options.num)
    with contextlib.ExitStack() as stack:
        # All are held until the last is chosen, so that none is chosen twice.
        return [_bind(stack, options.host, port) for port in wanted]


def _bind(stack: contextlib.ExitStack, host: str, port: int) -> int:
    bound = stack.enter_context(socket.socket())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be had: {error.strerror or error}",
            expected="another --port, or none for free ones; a --host of this machine",
        ) from None
    return bound.getsockname()[1]


class LocalServer:
    """One server's process: started, waited for, ended with all that it started.

    Args:
        plan: What runs where.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start it and wait until it is well.

        Raises:
            EngineError: where it ends before, or takes too long.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self.plan.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env=dict(os.environ) | dict(self.plan.environment),
            start_new_session=True,  # Ctrl-C is the supervisor's
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self.plan.server_arguments)
        self._process.stdin.close()
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
                while not await self._is_well(session):
                    await asyncio.wait([ended], timeout=_POLL_S)
                    self._raise_if_ended()
        except TimeoutError:
            raise EngineError(
                f"the server at {self.plan.address} was not ready after {READY_TIMEOUT_S:g} s"
            ) from None
        finally:
            ended.cancel()

    async def wait(self) -> int:
        """Wait for the end of the process; gives its exit status."""
        assert self._process is not None, "start() comes first"
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the process and all that it has started; nothing happens where none runs."""
        if self._process is None or self._process.returncode is not None:
            return
        tree = _tree(self._process.pid)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, tree[1:], timeout=END_TIMEOUT_S)

    async def _is_well(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(
                f"{self.plan.local_address}/health", timeout=_LOOK_TIMEOUT
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _raise_if_ended(self) -> None:
        status = self._process.returncode if self._process is not None else None
        if status is not None:
            raise EngineError(
                f"the server at {self.plan.address} did not start: its process ended with {status}",
                expected="what it said above, or says with rollout.engine.sglang.log_level=info, "
                "names the cause",
            )


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class LocalServers:
    """Starts servers, and starts those again that die.

    Leaving the `async with` block ends all of them. Where this process is killed, the kernel ends
    them.

    Args:
        plans: What runs where.
        say: Told what happens.
        max_restarts: How often one server is started again.

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
        """Keep all of them running, until one cannot be kept.

        Raises:
            EngineError: for a server that died too often, or does not start again.
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
                    expected="what it said above names the cause",
                )
            num_restarts += 1
            await self._restart(server, status, num_restarts)

    async def _restart(self, server: LocalServer, status: int, attempt: int) -> None:
        delay_s = min(2.0 ** (attempt - 1), LONGEST_BACKOFF_S)
        self._say(
            f"the server at {server.plan.address} ended with {status}; it is started again in "
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
    """Start servers, say where they are, and keep them running until this is cancelled.

    Raises:
        EngineError: where one does not start, or died too often.
    """
    say(f"starting {len(plans)} SGLang server{'s' * (len(plans) > 1)}: this takes a minute")
    async with LocalServers(plans, say=say, max_restarts=max_restarts) as servers:
        say(in_run_file(plans))
        await servers.watch()


def in_run_file(plans: Sequence[ServerPlan]) -> str:
    """The keys that lead a run to the servers."""
    addresses = ",".join(plan.address for plan in plans)
    return (
        f"rollout.engine.name=sglang_server 'rollout.engine.sglang_server.addresses=[{addresses}]'"
    )
