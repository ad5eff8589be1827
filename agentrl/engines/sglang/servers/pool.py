"""Several SGLang servers: which are available, and which one gets a call.

A server is available while it is healthy and has the pool's weights. Otherwise it is unavailable,
with a reason that every error names. It becomes unavailable when its connection breaks, when its
health check fails, when a call is late and no other call was answered since it was sent, or when a
weight update fails on it. Its running calls then end at once with `ServerLostError`. It becomes
available again when a health check succeeds and the same process has the weights of the pool's last
update. A server that was restarted must take the next update first.

The servers are those at given addresses, or those of a cluster (`ServerDirectory`), of which the
addresses change. A server of a cluster that was started again gets the weights of the last update
before it takes calls (`repair.py`). Calls wait for it if no other server is available.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import aiohttp

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.servers.client import (
    ServerClient,
    ServerLateError,
    ServerLostError,
    ServerState,
)
from agentrl.engines.sglang.servers.directory import ServerDirectory, ServerReport
from agentrl.engines.sglang.servers.handle import NOT_CHECKED, ServerHandle, StickyRouter
from agentrl.errors import EngineError

FIRST_BACKOFF_S = 0.25
IDLE_S = 0.5
"""If no call ran for so many seconds, the servers' states are queried before the next call."""
MAX_DOUBLINGS = 4
"""The time between two health checks of an unavailable server doubles at most this many times."""


class ServerPool:
    """Chooses servers for calls, and checks their health while its event loop runs.

    Args:
        settings: Addresses and timeouts.
        max_model_len: Most tokens of a sequence, which every server must allow.
        report: Gets a message when a server becomes available or unavailable.
        directory: The servers of a cluster; None: the servers of `settings`.
        needs: What the servers of a cluster run.
    """

    def __init__(
        self,
        settings: SGLangServerConfig,
        *,
        max_model_len: int,
        report: Callable[[str], None],
        directory: ServerDirectory | None = None,
        needs: SGLangNeeds | None = None,
    ) -> None:
        self.settings = settings
        self.servers: list[ServerHandle] = []
        self._directory = directory
        self._needs = needs
        self._slots: list[ServerHandle | None] = []
        self._reports: Sequence[ServerReport] = ()
        self._looking_up = asyncio.Lock()
        self._look_up_now = asyncio.Event()
        self._max_model_len = max_model_len
        self._report = report
        self._version: int | None = None
        self._router = StickyRouter()
        self._session: aiohttp.ClientSession | None = None
        self._follower: asyncio.Task[None] | None = None
        self._num_pauses = 0
        self._epoch = 0
        self._used_at = 0.0
        self._querying = asyncio.Lock()
        self._is_running = asyncio.Event()
        self._is_closed = False

    @property
    def shares_devices(self) -> bool:
        """Whether the servers and the training ranks use the same devices, in turns."""
        return self._directory is not None and self._directory.shares_devices

    def open(self) -> None:
        """Start to watch the servers on the running loop. Does nothing when repeated.

        Raises:
            EngineError: The pool was closed.
        """
        self._raise_if_closed()
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.health_timeout_s),
        )
        if not self._num_pauses:
            self._is_running.set()
        if self._directory is None:
            self.servers = [self._add_server(address) for address in self.settings.addresses]
        else:
            self._follower = asyncio.create_task(self._follow_directory())

    def _add_server(self, address: str, api_key: str | None = None) -> ServerHandle:
        assert self._session is not None, "open() comes first"
        client = ServerClient(address, self._session, self.settings, api_key)
        server = ServerHandle(client, is_owned=self._directory is not None)
        server.watcher = asyncio.create_task(self._watch(server))
        return server

    # Servers of a cluster.

    async def _follow_directory(self) -> None:
        while True:
            await self.look_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.health_interval_s):
                    await self._look_up_now.wait()
            self._look_up_now.clear()

    async def look_up(self) -> None:
        """Follow the servers of the cluster to their current addresses."""
        if self._directory is None:
            return
        async with self._looking_up:
            reports = await self._directory.look_up()
            if self._needs is not None and not all(report.has_needs for report in reports):
                self._directory.start(self._needs)
        if self._is_closed:
            return
        self._reports = reports
        self._slots += [None] * (len(reports) - len(self._slots))
        for index, report in enumerate(reports):
            self._slots[index] = self._follow(self._slots[index], report)
        self.servers = [server for server in self._slots if server is not None]

    def _follow(self, server: ServerHandle | None, report: ServerReport) -> ServerHandle | None:
        if server is not None and report.address == server.name:
            return server
        if server is not None:
            reason = report.problem or f"the cluster has replaced it by {report.address}"
            self.mark_unavailable(server, reason)
            for task in (server.watcher, server.check):
                if task is not None:
                    task.cancel()
        if report.address is None:
            return None
        return self._add_server(report.address, report.api_key)

    @property
    def _is_any_coming(self) -> bool:
        return self._directory is not None and not (
            self._reports and all(report.is_lost for report in self._reports)
        )

    async def close(self) -> None:
        """End every call and health check. The servers themselves continue to run."""
        self._is_closed = True
        self._is_running.set()
        found = [task for server in self.servers for task in (server.watcher, server.check)]
        tasks = [task for task in (self._follower, *found) if task is not None]
        for task in tasks:
            task.cancel()
        for server in self.servers:
            self.mark_unavailable(server, "the engine was closed")
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self.servers))
        if self._session is not None:
            await self._session.close()

    # Calls.

    async def choose(self, request_id: str, *, avoid: Sequence[ServerHandle] = ()) -> ServerHandle:
        """Choose a server: the conversation's own one, else the least loaded.

        If none is available, all are checked a few times, with growing waits; the servers of a
        cluster until `start_timeout_s` has passed or all are lost.

        Args:
            request_id: The conversation's.
            avoid: Servers on which this call has failed; chosen only if no other is available.

        Raises:
            EngineError: No server is available, with each one's problem; or the pool was closed.
        """
        self.open()
        await self._refresh_states()
        deadline = time.monotonic() + self.settings.start_timeout_s
        for attempt in itertools.count():
            await self._is_running.wait()
            self._raise_if_closed()
            if server := self._router.choose(request_id, self.servers, avoid=avoid):
                return server
            if not self._is_any_coming:
                if attempt > self.settings.max_retries:
                    break
            elif time.monotonic() > deadline:
                break
            await asyncio.sleep(FIRST_BACKOFF_S * 2 ** min(attempt, self.settings.max_retries))
            await self.look_up()
            await self._check_all()
        raise self._none_available()

    async def _refresh_states(self) -> None:
        """Before the first call, and the first after a pause, query the servers' states.

        Another process may have updated their weights, or one may have been restarted.
        """
        async with self._querying:
            is_first = not self.servers or any(
                server.problem == NOT_CHECKED for server in self.servers
            )
            has_calls = any(server.calls for server in self.servers)
            was_idle = not has_calls and time.monotonic() - self._used_at > IDLE_S
            if self._num_pauses or not (is_first or was_idle):
                return
            self._used_at = time.monotonic()
            await self.look_up()
            is_first = any(server.problem == NOT_CHECKED for server in self.servers)
            if is_first:
                await self._check_all()
                return
            for server in await self._query_states([s for s in self.servers if s.is_available]):
                self._update_availability(server)

    async def run_call(self, server: ServerHandle, fields: JsonFields) -> JsonFields:
        """Run a call on a server.

        Raises:
            ServerFailedError: Another server may succeed. If the server has failed as a whole, it
                is unavailable.
            EngineError: The server refuses the call.
        """
        sent_at, rid = time.monotonic(), fields["rid"]
        try:
            async with asyncio.timeout(None) as server.calls[rid]:
                try:
                    answer = await server.client.generate(fields)
                finally:
                    del server.calls[rid]
        except TimeoutError:
            raise ServerLostError(server.problem or f"{server.name} ended the call") from None
        except ServerLostError as error:
            self._fail(server, error)
            raise
        except ServerLateError as error:
            if server.answered_at < sent_at:
                self._fail(server, error)
            raise
        self._used_at = server.answered_at = time.monotonic()
        server.num_failures = 0
        return answer

    # Availability.

    def mark_unavailable(self, server: ServerHandle, problem: str) -> None:
        """Send a server no more calls, and end those that run on it."""
        was_available, server.problem = server.is_available, problem
        if was_available and not self._is_closed:
            has_others = any(other.is_available for other in self.servers)
            rest = "; its requests go to the others" if has_others else ""
            self._report(f"{server.describe(verb=' is unavailable')}{rest}")
        server.end_calls()

    def _fail(self, server: ServerHandle, error: EngineError) -> None:
        server.num_failures += 1
        self.mark_unavailable(server, str(error))
        self._look_up_now.set()

    def describe(self) -> str:
        """Return each address with its problem."""
        missing = (
            f"server {index}: {report.problem}"
            + "".join(f"\n  {line}" for line in report.log_lines)
            for index, report in enumerate(self._reports)
            if report.address is None
        )
        return "; ".join([*(server.describe() for server in self.servers), *missing])

    async def _check_all(self) -> None:
        await asyncio.gather(*(self.check(server) for server in self.servers))

    async def check(self, server: ServerHandle) -> None:
        """Check a server's health, or wait for the check that runs."""
        if server.check is None or server.check.done():
            server.check = asyncio.create_task(self._check(server))
        await asyncio.shield(server.check)

    async def _check(self, server: ServerHandle) -> None:
        epoch = self._epoch
        if self._num_pauses:
            return
        state = await _state_or_error(server.check_health())
        if epoch != self._epoch or self._is_closed:
            return  # the pool was paused during the check: the answer may be out of date
        if isinstance(state, EngineError):
            self._fail(server, state)
        else:
            server.update_state(state)
            self._update_availability(server)

    def _update_availability(self, server: ServerHandle) -> None:
        """Make a healthy server available, unless its state forbids it."""
        problem = server.unavailable_reason(
            self.servers, max_model_len=self._max_model_len, run_version=self._version
        )
        if problem is not None:
            self.mark_unavailable(server, problem)
            return
        if not server.is_available and server.problem != NOT_CHECKED:
            self._report(f"{server.name} is available again")
        server.problem = None

    async def _watch(self, server: ServerHandle) -> None:
        """Check a server's health forever; less often the longer it is unavailable."""
        while True:
            doublings = 0 if server.is_available else min(server.num_failures, MAX_DOUBLINGS)
            await asyncio.sleep(self.settings.health_interval_s * 2**doublings)
            await self.check(server)

    # Updates and sleep.

    def pause(self) -> None:
        """Let new calls wait, and check no server, until `resume` was called as often."""
        self._num_pauses += 1
        self._epoch += 1
        self._is_running.clear()

    def resume(self) -> None:
        """Undo one `pause`."""
        self._num_pauses -= 1
        if not self._num_pauses:
            self._is_running.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Open the pool and pause it while the block runs."""
        self.open()
        self.pause()
        try:
            yield
        finally:
            self.resume()

    async def reachable(self) -> list[ServerHandle]:
        """Return the servers that answer, also unavailable ones: they can take an update.

        The servers of a cluster are waited for while none answers.

        Raises:
            EngineError: No server answers.
        """
        deadline = time.monotonic() + self.settings.start_timeout_s
        await self.look_up()
        while not (found := await self._query_states(self.servers)):
            if not self._is_any_coming or time.monotonic() > deadline:
                break
            await asyncio.sleep(FIRST_BACKOFF_S)
            await self.look_up()
        if not found:
            raise self._none_available()
        return found

    async def _query_states(self, servers: Sequence[ServerHandle]) -> list[ServerHandle]:
        """Query each server's state; mark those that fail as unavailable, and return the rest."""
        states = await asyncio.gather(*(_state_or_error(s.client.read_state()) for s in servers))
        found: list[ServerHandle] = []
        for server, state in zip(servers, states, strict=True):
            if isinstance(state, EngineError):
                self._fail(server, state)
            else:
                server.update_state(state)
                found.append(server)
        return found

    async def for_each(
        self, act: Callable[[ServerHandle], Awaitable[None]], *, available_only: bool
    ) -> None:
        """Act on every server at once; mark those on which it fails as unavailable.

        Raises:
            EngineError: No server is available afterwards.
        """
        servers = [s for s in self.servers if s.is_available or not available_only]
        await asyncio.gather(*(self._act(server, act) for server in servers))
        if not any(server.is_available for server in self.servers):
            raise self._none_available()

    async def _act(
        self, server: ServerHandle, act: Callable[[ServerHandle], Awaitable[None]]
    ) -> None:
        try:
            await act(server)
        except EngineError as error:
            self._fail(server, error)

    def end_update(self, servers: Sequence[ServerHandle], version: int) -> None:
        """Make exactly these servers available: they have the new weights."""
        self._version = version
        for server in self.servers:
            server.synced_start_id = None
            if server not in servers and server.is_available:
                self.mark_unavailable(server, "it did not take the last update of the weights")
        for server in servers:
            assert server.state is not None, "its state was queried before the update"
            server.state = replace(server.state, weight_version=f"{version}")
            server.synced_start_id, server.weights_problem = server.state.start_id, None
            self._update_availability(server)

    async def follow_update(self, version: int) -> None:
        """Make exactly the servers available that have the weights another rank has just sent.

        Raises:
            EngineError: No server has them.
        """
        updated = [
            server
            for server in await self.reachable()
            if server.state is not None and server.state.weight_version == f"{version}"
        ]
        self.end_update(updated, version)
        if not updated:
            raise self._none_available()

    def fail_update(self, server: ServerHandle, problem: str) -> None:
        """Send a server no calls until an update succeeds on it."""
        server.synced_start_id = None
        server.weights_problem = problem
        self.mark_unavailable(server, problem)

    def _none_available(self) -> EngineError:
        has_answered = any(server.state is not None for server in self.servers)
        if has_answered or self._directory is not None:
            return EngineError("no SGLang server is available", servers=self.describe())
        return EngineError(
            "no SGLang server answers",
            servers=self.describe(),
            key="rollout.engine.sglang_server.addresses",
            expected="the addresses of running servers: `agentrl serve` starts servers and prints "
            "their addresses",
        )

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine was closed")


async def _state_or_error(query: Awaitable[ServerState]) -> ServerState | EngineError:
    try:
        return await query
    except EngineError as error:
        return error
