"""`SGLangServerEngine`: SGLang servers that run already, or that the run's cluster starts."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.protocol import ALL_MEMORY, MemoryTag, SyncFigures
from agentrl.engines.sglang.backend import JsonFields, flush
from agentrl.engines.sglang.calls import AbortableCall, BaseSGLangEngine
from agentrl.engines.sglang.media import has_media, no_tower
from agentrl.engines.sglang.servers.client import ServerFailedError
from agentrl.engines.sglang.servers.handle import HALF_UPDATED, ServerHandle
from agentrl.engines.sglang.servers.pool import FIRST_BACKOFF_S, ServerPool
from agentrl.engines.sglang.servers.repair import WeightRepairer
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION, Target, Transport, update_weights
from agentrl.engines.stopping import Decode
from agentrl.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentrl.engines.sglang.weights.buckets import ModelWeights

logger = logging.getLogger(__name__)


class SGLangServerEngine(BaseSGLangEngine):
    """Generates on one or more SGLang servers, which it neither starts nor ends.

    A conversation stays on one server, whose radix cache has its beginning. A new one goes to the
    least loaded server. If a server dies, hangs or fails, it gets no calls, and its running calls
    are sent to another server with the same ids. The first call checks every server.

    Args:
        settings: Addresses and timeouts.
        decode: Token ids to text, for stop strings.
        max_model_len: Most tokens of a sequence.
        transport: Sends new weights to the servers; closed with the engine.
        weights: The model that the servers were started with; None: new weights are neither checked
            nor renamed.
        pool: The servers; None: those of `settings`.
        repairer: Gets a copy of the weights that this process sends, for servers that a cluster
            starts again.
    """

    is_shared = True

    def __init__(
        self,
        settings: SGLangServerConfig,
        decode: Decode,
        *,
        max_model_len: int,
        transport: Transport,
        weights: "ModelWeights | None" = None,
        pool: ServerPool | None = None,
        repairer: WeightRepairer | None = None,
    ) -> None:
        super().__init__(decode, max_model_len)
        self.pool = pool or ServerPool(settings, max_model_len=max_model_len, report=logger.warning)
        self._repairer = repairer
        self.shares_devices = self.pool.shares_devices
        self._transport = transport
        self._weights = weights
        self._asleep: set[MemoryTag] = set()

    def new_call(self, request_id: str) -> AbortableCall:
        """Make the call of one `generate`."""
        return ServerCall(self.pool, request_id)

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Send new weights to every server that answers, while calls wait.

        Running calls then continue after their tokens. A server on which the update fails is
        unavailable until an update succeeds there. If it fails on all, the engine takes no calls
        until then.

        Raises:
            EngineError: No server has taken all weights.
        """
        if self._weights is not None:
            named_tensors = self._weights.for_files(named_tensors)
        if self._repairer is None:
            return await self._send_to_all(named_tensors, version)
        kept: list[tuple[str, torch.Tensor]] = []
        await self._repairer.stop()
        figures = await self._send_to_all(_keep_copies(named_tensors, kept), version)
        await self._repairer.keep(kept, version)
        return figures

    async def _send_to_all(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int
    ) -> SyncFigures:
        with self.pool.paused():
            servers = {
                Target(server.backend, server.state.tp_size if server.state else 1): server
                for server in await self.pool.reachable()
            }

            async def fail(target: Target, error: EngineError) -> None:
                problem = f"an update of its weights has failed, it may hold a mixture: {error}"
                self.pool.fail_update(servers[target], problem)

            report = await update_weights(
                list(servers),
                named_tensors,
                version=version,
                transport=self._transport,
                on_failure=fail,
            )
            updated = [
                server for target, server in servers.items() if target not in report.failures
            ]
            self.pool.end_update(updated, version)
        return report.figures

    async def follow_update(self, *, version: int) -> None:
        """Learn which servers have the weights that another rank sent (see `FollowsUpdates`).

        Raises:
            EngineError: No server has them.
        """
        with self.pool.paused():
            await self.pool.follow_update(version)

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Running calls compute theirs again."""
        with self.pool.paused():
            await self.pool.for_each(lambda server: flush(server.backend), available_only=True)

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Let the servers release memory until `wake`, if they can; calls wait.

        Raises:
            EngineError: It fails on all servers. Then no server sleeps, and no call waits.
        """
        self.pool.open()
        if not self._asleep:
            self.pool.pause()
        self._asleep.update(tags)
        if self._repairer is not None:
            await self._repairer.stop()

        async def fall_asleep(server: ServerHandle) -> None:
            if self.shares_devices and MemoryTag.WEIGHTS in tags:
                # The other clients learn from it that the server takes no calls.
                fields = {"new_version": UNFIT_VERSION, "abort_all_requests": False}
                await server.backend.control("update_weight_version", fields)
            await server.backend.sleep(tags)

        try:
            await self.pool.for_each(fall_asleep, available_only=True)
        except BaseException:
            with contextlib.suppress(EngineError):
                await self.wake()
            raise

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Let the servers allocate memory again; calls continue when none sleeps.

        Raises:
            EngineError: No server is available.
        """
        if not self._asleep:
            return
        try:
            await self.pool.for_each(lambda server: server.backend.wake(tags), available_only=False)
        finally:
            # A server that failed is unavailable; its next health check wakes it again.
            self._asleep.difference_update(tags)
            if not self._asleep:
                self.pool.resume()

    async def close(self) -> None:
        """Send the servers nothing more; running calls end with `EngineError`."""
        try:
            if self._repairer is not None:
                await self._repairer.close()
            await self._transport.close()
        finally:
            await self.pool.close()


def _keep_copies(
    named_tensors: "Iterable[tuple[str, torch.Tensor]]", kept: "list[tuple[str, torch.Tensor]]"
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Iterate over weights, and add a copy of each in the CPU's memory to a list."""
    for name, tensor in named_tensors:
        kept.append((name, tensor.detach().to("cpu", copy=True)))
        yield name, tensor


class ServerCall(AbortableCall):
    """An engine call that is sent to the next server if one fails.

    A server returns a whole completion or nothing. What a failed server has sampled was never used,
    so the next server gets the same ids, and no token is lost or repeated.

    Args:
        pool: The servers.
        request_id: The conversation, which stays on one server while that is available.
    """

    def __init__(self, pool: ServerPool, request_id: str) -> None:
        super().__init__(request_id, patience_s=pool.settings.health_timeout_s)
        self._pool = pool

    async def sample(self, fields: JsonFields) -> JsonFields:
        """Send the call to a server, and to others if it fails (see `AbortableCall.sample`)."""
        failures: dict[ServerHandle, EngineError] = {}
        for attempt in range(self._pool.settings.max_retries + 1):
            server = await self._pool.choose(self.request_id, avoid=list(failures))
            if has_media(fields) and server.state is not None and not server.state.has_tower:
                raise no_tower(server.name, self.request_id)
            if server in failures:
                await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
            try:
                return await self._send(server, {**fields, "rid": f"{fields['rid']}{attempt}/"})
            except ServerFailedError as error:
                failures[server] = error
        raise EngineError(
            f"a completion has failed {self._pool.settings.max_retries + 1} times, on "
            f"{len(failures)} of {len(self._pool.servers)} SGLang servers",
            request_id=self.request_id,
            servers=self._pool.describe(),
            failures="; ".join(map(str, failures.values())),
        )

    async def _send(self, server: ServerHandle, fields: JsonFields) -> JsonFields:
        with self.sent(partial(server.client.abort, fields["rid"])):
            answer = await self._pool.run_call(server, fields)
        if answer["meta_info"].get("weight_version") == UNFIT_VERSION and not self.is_aborted:
            self._pool.mark_unavailable(server, HALF_UPDATED)
            raise ServerFailedError(f"{server.name} has answered during an incomplete update")
        return answer
