"""`WeightRepairer`: gives the run's weights to servers that a cluster has started again."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.client import ServerClient, ServerState
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.engines.sglang.weights.sync import Target, Transport, update_weights
from agentrl.errors import EngineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""Seconds that a repair has to end before a full update."""

NamedTensors = Sequence[tuple[str, "torch.Tensor"]]


class WeightRepairer:
    """Keeps the weights of the last update, and sends them to each server that lacks them.

    It runs in a thread of its own, because the event loop of a rank runs during the rollout only,
    and the requests of other ranks may wait for a server. Clients learn from the server's version
    that it has the weights.

    Args:
        directory: The servers.
        needs: What they run.
        settings: Timeouts; a server is checked every `health_interval_s`.
        transport: Sends the weights from the CPU's memory. Used by this thread alone.
    """

    def __init__(
        self,
        directory: ServerDirectory,
        needs: SGLangNeeds,
        settings: SGLangServerConfig,
        transport: Transport,
    ) -> None:
        self._directory = directory
        self._needs = needs
        self._settings = settings
        self._transport = transport
        self._weights: NamedTensors = ()
        self._version: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._work: asyncio.Task[None] | None = None

    async def keep(self, weights: NamedTensors, version: int) -> None:
        """Send these weights to each server that lacks them, until `stop`.

        Args:
            weights: Of an update that has just ended. The tensors must not change.
            version: The version of the weights.
        """
        self._weights, self._version = weights, version
        await self._call(self._start_work())

    async def stop(self) -> None:
        """Send nothing more and forget the weights: they are old, or the servers sleep.

        Raises:
            EngineError: A running repair does not end.
        """
        self._weights, self._version = (), None
        if self._loop is not None:
            await self._call(self._stop_work())

    async def close(self) -> None:
        """End the thread. Can be repeated."""
        loop = self._loop
        if loop is None:
            return
        await self._call(self._stop_work())
        self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def _call(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_forever, args=(self._loop,), name="weight-repairer", daemon=True
            )
            self._thread.start()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except TimeoutError:
            raise EngineError(
                f"sending weights to a server that was started again did not end in "
                f"{STOP_TIMEOUT_S:g} s"
            ) from None

    async def _start_work(self) -> None:
        await self._stop_work()
        self._work = asyncio.create_task(self._repair_forever())

    async def _stop_work(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._work = None

    async def _repair_forever(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.health_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                await asyncio.sleep(min(1.0, self._settings.health_interval_s))
                await self._repair_all(session)

    async def _repair_all(self, session: aiohttp.ClientSession) -> None:
        reports = await self._directory.look_up()
        if not all(report.has_needs for report in reports):
            self._directory.start(self._needs)
        for report in reports:
            if report.address is not None and self._version is not None:
                client = ServerClient(report.address, session, self._settings, report.api_key)
                with contextlib.suppress(EngineError):  # checked again in the next round
                    state = await client.read_state()
                    if state.weight_version != f"{self._version}":
                        await self._repair(client, state, self._version)

    async def _repair(self, client: ServerClient, state: ServerState, version: int) -> None:
        async def fail(_: Target, error: EngineError) -> None:
            logger.warning("%s did not take the run's weights: %s", client.name, error)

        await update_weights(
            [Target(client, state.tp_size)],
            self._weights,
            version=version,
            transport=self._transport,
            on_failure=fail,
        )
        logger.warning("%s has taken the run's weights (version %d)", client.name, version)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
