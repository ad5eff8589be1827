"""`SGLangServerEngine`: SGLang servers behind addresses."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    EngineCall,
    MemoryTag,
    SamplingParams,
    SyncFigures,
    generate_each,
)
from agentrl.engines.sglang.backend import flush
from agentrl.engines.sglang.calls import complete
from agentrl.engines.sglang.servers.calls import PooledCall
from agentrl.engines.sglang.servers.pool import ServerPool
from agentrl.engines.sglang.weights.sync import Target, Transport, update_weights
from agentrl.engines.stopping import Decode
from agentrl.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentrl.engines.sglang.weights.buckets import ModelWeights

_LOG = logging.getLogger(__name__)


class SGLangServerEngine:
    """Generates on any number of SGLang servers, which others started and end.

    A conversation stays on one server, whose radix cache knows it; a new one goes to the least
    loaded. A server that dies, hangs or fails gets no calls, and those that ran on it are asked of
    another, with the same ids. The first call looks at every server.

    Args:
        settings: Addresses, and how long what may take.
        decode: Token ids to text, for stop strings.
        max_model_len: Most tokens of a sequence.
        transport: The way of new weights to the servers; closed with the engine.
        weights: What the servers were started with; None: new weights are neither checked nor
            renamed.
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
    ) -> None:
        self.max_model_len = max_model_len
        self.pool = ServerPool(settings, max_model_len=max_model_len, say=_LOG.warning)
        self._decode = decode
        self._transport = transport
        self._weights = weights
        self._keys = itertools.count()
        self._running: set[PooledCall] = set()
        self._asleep: set[MemoryTag] = set()

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`).

        Raises:
            EngineError: The input leaves no room for a token, or no server can answer.
        """
        call = EngineCall(input_ids=input_ids, sampling=sampling, request_id=request_id)
        pooled = PooledCall(self.pool, request_id)
        self._running.add(pooled)
        try:
            return await complete(
                pooled,
                call,
                # SGLang aborts whatever begins with the name that it is given.
                key=f"{request_id}/{next(self._keys)}/",
                max_model_len=self.max_model_len,
                decode=self._decode,
            )
        finally:
            self._running.discard(pooled)

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that begin at once (see `Engine.generate_together`)."""
        return await generate_each(self, calls)

    async def abort(self, request_id: str) -> None:
        """End the running calls of a request; they return what they have sampled."""
        found = [call for call in self._running if call.request_id == request_id]
        await asyncio.gather(*(call.abort() for call in found))

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Bring new weights to every server that answers, while calls wait.

        Calls that run go on with them from their tokens. A server on which it fails is out until
        an update succeeds there; where it fails on all, the engine takes no calls until then.

        Raises:
            EngineError: where no server has taken the weights whole.
        """
        self.pool.open()
        if self._weights is not None:
            named_tensors = self._weights.for_files(named_tensors)
        with self.pool.held():
            members = {
                Target(member.backend, member.state.tp_size if member.state else 1): member
                for member in await self.pool.reachable()
            }

            async def take_out(target: Target, error: EngineError) -> None:
                why = f"an update of its weights has failed, it may hold a mixture: {error}"
                self.pool.break_weights(members[target], why)

            report = await update_weights(
                list(members),
                named_tensors,
                version=version,
                transport=self._transport,
                on_failure=take_out,
            )
            taken = [member for target, member in members.items() if target not in report.failures]
            self.pool.end_update(taken, version)
        return report.figures

    async def follow_update(self, *, version: int) -> None:
        """Hear which servers have the weights that another rank has sent (see `FollowsUpdates`).

        Raises:
            EngineError: where none has them.
        """
        self.pool.open()
        with self.pool.held():
            await self.pool.follow_update(version)

    async def flush_cache(self) -> None:
        """Drop every cached prefix; running calls compute theirs anew."""
        self.pool.open()
        with self.pool.held():
            await self.pool.with_all(lambda member: flush(member.backend))

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Have the servers give memory back until `wake`, where they can; calls wait.

        Raises:
            EngineError: where it fails on all; then none is left asleep, and no call waits.
        """
        self.pool.open()
        if not self._asleep:
            self.pool.hold()
        self._asleep.update(tags)
        try:
            await self.pool.with_all(lambda member: member.backend.sleep(tags))
        except BaseException:
            with contextlib.suppress(EngineError):
                await self.wake()
            raise

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Have the servers take memory again; when all is awake, calls go on.

        Raises:
            EngineError: where none is left.
        """
        if not self._asleep:
            return
        try:
            await self.pool.with_everyone(lambda member: member.backend.wake(tags))
        finally:
            # Who failed is out, and is woken again before it is let in.
            self._asleep.difference_update(tags)
            if not self._asleep:
                self.pool.release()

    async def close(self) -> None:
        """Ask the servers nothing more; running calls end with `EngineError`."""
        try:
            await self._transport.close()
        finally:
            await self.pool.close()
