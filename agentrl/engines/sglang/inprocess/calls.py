"""One engine call to SGLang in this process's keep, that can be aborted wherever it stands."""

import asyncio
import contextlib

from agentrl.engines.sglang.backend import Backend, JsonFields
from agentrl.engines.sglang.calls import NOTHING_SAMPLED

ABORT_AGAIN_S = 0.5
"""SGLang forgets an abort that comes before it has sent the call on: it is told again."""
ABORT_PATIENCE_S = 5.0
"""Seconds for a call to return what it has sampled; one that waits for a pause to end does not."""


class OwnCall:
    """A `Sampler` whose call can be aborted, also where SGLang has not begun it.

    Args:
        backend: The running SGLang.
        request_id: Whose call it is.
    """

    def __init__(self, backend: Backend, request_id: str) -> None:
        self.request_id = request_id
        self._backend = backend
        self._is_aborted = False
        self._rid = ""
        self._scope: asyncio.Timeout | None = None
        self._ended = asyncio.Event()

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion (see `Sampler.generate`); once aborted, nothing is sampled."""
        if self._is_aborted:
            return NOTHING_SAMPLED
        self._rid = fields["rid"]
        self._ended.clear()
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                return await self._backend.generate(fields)
        except TimeoutError:
            if not scope.expired():
                raise
            return NOTHING_SAMPLED
        finally:
            self._scope = None
            self._ended.set()

    async def abort(self) -> None:
        """End the call with what SGLang has sampled; without it where that does not come."""
        self._is_aborted = True
        deadline = asyncio.get_running_loop().time() + ABORT_PATIENCE_S
        while self._scope is not None:
            if asyncio.get_running_loop().time() > deadline:
                self._give_up(self._scope)
                break
            await self._backend.control("abort_request", {"rid": self._rid})
            await self._wait()

    def _give_up(self, scope: asyncio.Timeout) -> None:
        if not scope.expired():
            scope.reschedule(0)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_AGAIN_S):
                await self._ended.wait()
