"""`ServerWorker`: starts and supervises one SGLang server of a cluster."""

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.directory import ServerReport
from agentrl.engines.sglang.servers.launch import (
    READY_TIMEOUT_S,
    LocalServer,
    ServeOptions,
    ServerPlan,
    plan_servers,
)
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION
from agentrl.errors import AgentRLError

LOG_LINES = 20
"""Lines of the log that a report has."""
_LOG_TAIL_BYTES = 16_384
END_TIMEOUT_S = 30.0
_STANDARD_ERROR = "/proc/self/fd/2"

Planner = Callable[[SGLangNeeds, ServeOptions], list[ServerPlan]]


class ServerWorker:
    """One server, which ends with this process, however this process ends.

    The server is started by a thread that lives as long as the server: the kernel kills the server
    when that thread ends (parent-death signal).

    Args:
        host: The address of this machine at which other nodes reach it.
        log_path: The file of the server's output; None: where this process's standard error goes.
        devices: Environment variables that choose its devices; empty: those of this process.
        start_timeout_s: Seconds from the start until it must answer.
        on_end: Called once from another thread when the server has ended by itself or did not
            start, such as to end this process, so that the cluster starts it again.
        plan: Makes the plan of the server.
    """

    def __init__(
        self,
        *,
        host: str,
        log_path: Path | None = None,
        devices: Mapping[str, str] | None = None,
        start_timeout_s: float = READY_TIMEOUT_S,
        on_end: Callable[[str], None] | None = None,
        plan: Planner = plan_servers,
    ) -> None:
        self._host = host
        self._log_path = log_path
        self._devices = dict(devices or {})
        self._start_timeout_s = start_timeout_s
        self._on_end = on_end
        self._plan = plan
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._is_ended = False
        self._report = ServerReport(address=None, problem="it was not started", has_needs=False)

    def start(self, needs: SGLangNeeds) -> None:
        """Start the server, without a wait until it is ready. Does nothing when repeated."""
        with self._lock:
            if self._thread is not None or self._is_ended:
                return
            self._report = ServerReport(address=None, problem="it is starting")
            self._thread = threading.Thread(
                target=self._run, args=(needs,), name="sglang-server", daemon=True
            )
            self._thread.start()

    def report(self) -> ServerReport:
        """Return its address, or why it has none."""
        return self._report

    def log_lines(self, count: int = LOG_LINES) -> tuple[str, ...]:
        """Return the last lines of its log."""
        path = self._log_path or Path(os.path.realpath(_STANDARD_ERROR))
        if not path.is_file():
            return ()
        try:
            with path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ()
        return tuple(text.splitlines()[-count:])

    def end(self) -> None:
        """End the server and wait for its processes, at most `END_TIMEOUT_S`. Can be repeated."""
        with self._lock:
            self._is_ended = True
            thread, loop, ending = self._thread, self._loop, self._ending
        if loop is not None and ending is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(ending.set)
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_TIMEOUT_S)

    def _run(self, needs: SGLangNeeds) -> None:
        try:
            problem = asyncio.run(self._supervise(needs))
        except (AgentRLError, OSError) as error:
            problem = str(error)
        self._report = ServerReport(
            address=None, problem=problem, has_failed=True, log_lines=self.log_lines()
        )
        if self._on_end is not None and not self._is_ended:
            self._on_end(problem)

    async def _supervise(self, needs: SGLangNeeds) -> str:
        """Run the server to its end, and return why it ended."""
        ending = asyncio.Event()
        with self._lock:
            self._loop, self._ending = asyncio.get_running_loop(), ending
            if self._is_ended:
                return "it was ended"
        if needs.given.get("tokenizer_worker_num", 1) == 1:  # else SGLang refuses a key
            needs = replace(needs, api_key=secrets.token_urlsafe(32))
        [plan] = self._plan(needs, ServeOptions(host=self._host))
        arguments = dict(plan.arguments) | {"weight_version": UNFIT_VERSION}
        environment = dict(plan.environment) | self._devices
        if self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
        server = LocalServer(
            replace(plan, arguments=arguments, environment=environment),
            log_path=self._log_path,
            ready_timeout_s=self._start_timeout_s,
        )
        stopped = asyncio.create_task(ending.wait())
        running = asyncio.create_task(self._keep(server, needs.api_key))
        try:
            await asyncio.wait([stopped, running], return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else "it was ended"
        finally:
            stopped.cancel()
            running.cancel()
            await server.end()
            await asyncio.gather(stopped, running, return_exceptions=True)

    async def _keep(self, server: LocalServer, api_key: str | None) -> str:
        await server.start()
        self._report = ServerReport(address=server.plan.address, api_key=api_key)
        status = await server.wait()
        return f"its process at {server.plan.address} ended with {status}"
