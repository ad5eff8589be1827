"""One engine call's way through a pool of servers: placed, retried, aborted."""

import asyncio
from typing import Any

from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.calls import NOTHING_SAMPLED
from agentrl.engines.sglang.servers.client import ServerFailedError
from agentrl.engines.sglang.servers.handle import HALF_UPDATED, Member
from agentrl.engines.sglang.servers.pool import FIRST_BACKOFF_S, ServerPool
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION
from agentrl.errors import EngineError

ABORT_AGAIN_S = 0.5
"""A server forgets an abort that it hears before the call itself: it is told again."""


class PooledCall:
    """A `Sampler` that asks the next server where one fails.

    A server returns a completion whole or not at all, so what a failed one had sampled was seen by
    nobody: the next is asked with the same ids, and nothing is lost or there twice.

    Args:
        pool: Whose servers are asked.
        request_id: The conversation, which stays on one server while that is in.
    """

    def __init__(self, pool: ServerPool, request_id: str) -> None:
        self.request_id = request_id
        self._pool = pool
        self._asked: tuple[Member, str] | None = None
        self._scope: asyncio.Timeout | None = None
        self._is_aborted = False
        self._ended = asyncio.Event()

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion (see `Sampler.generate`); once aborted, nothing is sampled."""
        if self._is_aborted:
            return NOTHING_SAMPLED
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                return await self._ask_each(fields)
        except TimeoutError:
            if not scope.expired():
                raise
            return NOTHING_SAMPLED
        finally:
            self._scope = None

    async def abort(self) -> None:
        """End the call with what its server has sampled; without it where the server is silent."""
        self._is_aborted = True
        patience_s = self._pool.settings.health_timeout_s
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._scope is not None and self._asked is not None:
            member, rid = self._asked
            await member.server.abort(rid)
            if await self._has_ended() or asyncio.get_running_loop().time() > deadline:
                break
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(0)

    async def _has_ended(self) -> bool:
        try:
            async with asyncio.timeout(ABORT_AGAIN_S):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _ask_each(self, fields: JsonFields) -> JsonFields:
        failures: dict[Member, EngineError] = {}
        for attempt in range(self._pool.settings.max_retries + 1):
            member = await self._pool.place(self.request_id, avoid=list(failures))
            if member in failures:
                await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
            try:
                return await self._ask(member, {**fields, "rid": f"{fields['rid']}{attempt}/"})
            except ServerFailedError as error:
                failures[member] = error
        raise EngineError(
            f"a completion has failed {self._pool.settings.max_retries + 1} times, on "
            f"{len(failures)} of {len(self._pool.members)} SGLang servers",
            request_id=self.request_id,
            servers=self._pool.in_words(),
            failures="; ".join(map(str, failures.values())),
        )

    async def _ask(self, member: Member, fields: dict[str, Any]) -> JsonFields:
        self._asked = (member, fields["rid"])
        self._ended.clear()
        try:
            answer = await self._pool.ask(member, fields)
        finally:
            self._asked = None
            self._ended.set()
        if answer["meta_info"].get("weight_version") == UNFIT_VERSION and not self._is_aborted:
            self._pool.take_out(member, HALF_UPDATED)
            raise ServerFailedError(f"{member.name} has answered by half of an update")
        return answer
