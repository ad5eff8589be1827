"""What every running SGLang is asked, wherever it runs."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.engines.protocol import MemoryTag
from agentrl.errors import EngineError

JsonFields = Mapping[str, Any]
"""Fields of a request or an answer, under SGLang's names."""


class Sampler(Protocol):
    """Who samples one completion: one running SGLang, or the next that can, of several."""

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion; cancelling it aborts it inside SGLang.

        Args:
            fields: Of `GenerateReqInput`.

        Returns:
            `output_ids` and `meta_info`.

        Raises:
            EngineError: where SGLang refuses it, fails, or is gone.
        """
        ...


class Backend(Sampler, Protocol):
    """One running SGLang: in this process's keep, or a server behind an address."""

    name: str
    """What an error calls it: `the SGLang engine`, or the server's address."""

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Ask for anything else, and wait until it is done.

        Args:
            request: As the server's routes name it: `flush_cache`, `abort_request`,
                `pause_generation`, `continue_generation`, `begin_weight_update`,
                `update_weights_from_tensor`, `end_weight_update`, ...
            fields: Of that request; tensors as serialized bytes.

        Raises:
            EngineError: where SGLang refuses it, fails, or is gone.
        """
        ...


logger = logging.getLogger(__name__)


class SleepingBackend:
    """A `Backend` that can give memory back. While it sleeps, generation stays paused.

    Args:
        backend: The running SGLang.
        can_sleep: Whether it was started with a memory saver, which needs an accelerator.
    """

    def __init__(self, backend: Backend, *, can_sleep: bool) -> None:
        self.name = backend.name
        self._backend = backend
        self._can_sleep = can_sleep
        self._asleep: set[MemoryTag] = set()
        self._has_said_so = False

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion; it waits while SGLang sleeps (see `Backend.generate`)."""
        return await self._backend.generate(fields)

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Ask for anything else; to go on generating waits for `wake` (see `Backend.control`)."""
        if request != "continue_generation" or not self._asleep:
            await self._backend.control(request, fields)

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Give memory back, unless it is or SGLang cannot."""
        if not self._can_sleep:
            self._say_so()
            return
        now = [tag for tag in tags if tag not in self._asleep]
        if now:
            await self._backend.control("pause_generation", {"mode": "retract"})
            try:
                await self._backend.control("release_memory_occupation", {"tags": _names(now)})
            except BaseException:
                with contextlib.suppress(EngineError):
                    await self.control("continue_generation")
                raise
            self._asleep.update(now)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take back what sleeps of it; when nothing sleeps any more, generation goes on."""
        now = [tag for tag in tags if tag in self._asleep]
        if now:
            await self._backend.control("resume_memory_occupation", {"tags": _names(now)})
            self._asleep.difference_update(now)
            await self.control("continue_generation")

    def _say_so(self) -> None:
        if not self._has_said_so:
            logger.warning("%s has no memory to give back: it does not sleep", self.name)
        self._has_said_so = True


async def flush(backend: Backend) -> None:
    """Drop every cached prefix; calls that run wait, and compute theirs anew."""
    try:
        await backend.control("pause_generation", {"mode": "retract"})
        await backend.control("flush_cache")
    finally:
        await backend.control("continue_generation")


def _names(tags: Sequence[MemoryTag]) -> list[str]:
    return [tag.value for tag in tags]
