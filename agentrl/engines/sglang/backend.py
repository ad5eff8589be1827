"""The interface of one running SGLang, and its memory while the trainer updates the policy."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.engines.protocol import MemoryTag
from agentrl.errors import EngineError

logger = logging.getLogger(__name__)

JsonFields = Mapping[str, Any]
"""Fields of a request or an answer, under SGLang's names."""


class Sampler(Protocol):
    """Samples one completion, on one running SGLang or on one of several."""

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Sample one completion. Cancelling the call aborts it inside SGLang.

        Args:
            fields: Of `GenerateReqInput`.

        Returns:
            `output_ids` and `meta_info`.

        Raises:
            EngineError: SGLang refuses the call, fails, or has ended.
        """
        ...


class Backend(Sampler, Protocol):
    """One running SGLang: inside this process, or a server."""

    name: str
    """Its name in error messages: `the SGLang engine`, or the server's address."""

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Send any other request, and wait until it is done.

        Args:
            request: The server's route: `flush_cache`, `abort_request`, `pause_generation`,
                `continue_generation`, `begin_weight_update`, `update_weights_from_tensor`,
                `end_weight_update`, ...
            fields: Of that request; tensors as serialized bytes.

        Raises:
            EngineError: SGLang refuses the request, fails, or has ended.
        """
        ...


class SleepingBackend:
    """A `Backend` that can release its memory. Generation stays paused while it sleeps.

    Args:
        backend: The running SGLang.
        can_sleep: Whether it was started with a memory saver, which needs an accelerator.
    """

    def __init__(self, backend: Backend, *, can_sleep: bool) -> None:
        self.name = backend.name
        self.generate = backend.generate
        self._backend = backend
        self._can_sleep = can_sleep
        self._asleep: set[MemoryTag] = set()
        self._has_warned = False

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Send a request, except `continue_generation` during sleep (see `Backend.control`)."""
        if request != "continue_generation" or not self._asleep:
            await self._backend.control(request, fields)

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release memory. Does nothing for memory that sleeps, or if SGLang cannot sleep."""
        if not self._can_sleep:
            if not self._has_warned:
                logger.warning("%s cannot release memory: it does not sleep", self.name)
            self._has_warned = True
            return
        new = [tag for tag in tags if tag not in self._asleep]
        if new:
            await self._backend.control("pause_generation", {"mode": "retract"})
            try:
                await self._backend.control("release_memory_occupation", _tag_fields(new))
            except BaseException:
                with contextlib.suppress(EngineError):
                    await self.control("continue_generation")
                raise
            self._asleep.update(new)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory that sleeps again; generation continues when none sleeps."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if asleep:
            await self._backend.control("resume_memory_occupation", _tag_fields(asleep))
            self._asleep.difference_update(asleep)
            await self.control("continue_generation")


async def flush(backend: Backend) -> None:
    """Drop every cached prefix. Running calls wait, then compute their prefixes again."""
    try:
        await backend.control("pause_generation", {"mode": "retract"})
        await backend.control("flush_cache")
    finally:
        await backend.control("continue_generation")


def _tag_fields(tags: Sequence[MemoryTag]) -> JsonFields:
    return {"tags": [tag.value for tag in tags]}
