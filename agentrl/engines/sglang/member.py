"""One server of a pool: whether it gets calls, what runs on it, what it told last."""

import asyncio
from dataclasses import dataclass, field

from agentrl.engines.protocol import ALL_MEMORY
from agentrl.engines.sglang.calls import FIRST_VERSION
from agentrl.engines.sglang.server import ServerState, SGLangServer
from agentrl.engines.sglang.sleeping import SleepingBackend

NOT_LOOKED_AT = "it was not looked at yet"


@dataclass(eq=False, slots=True)
class Member:
    """One server of the pool."""

    server: SGLangServer
    trouble: str | None = NOT_LOOKED_AT
    """Why it gets no calls; None: it is in."""
    calls: dict[str, asyncio.Timeout] = field(default_factory=dict[str, asyncio.Timeout])
    """What runs on it, each with the means to end it here."""
    num_homes: int = 0
    """Conversations that were placed on it."""
    answered_at: float = 0.0
    """When it last answered a call (monotonic)."""
    strikes: int = 0
    """Failures since it last answered a call."""
    state: ServerState | None = None
    """What it told last."""
    synced_birth: str | None = None
    """The process that took the pool's last update; None: none did."""
    broken_weights: str | None = None
    """Why its weights are not whole; None: they are."""
    looking: asyncio.Task[None] | None = None
    """A look that is under way."""
    backend: SleepingBackend = field(init=False)
    """The way for control requests, which knows what of its memory sleeps."""

    def __post_init__(self) -> None:
        self.backend = SleepingBackend(self.server, can_sleep=False)

    @property
    def name(self) -> str:
        """Its address."""
        return self.server.name

    @property
    def is_in(self) -> bool:
        """Whether it gets calls."""
        return self.trouble is None

    def in_words(self, verb: str = "") -> str:
        """Its address, once, and what is wrong with it.

        Args:
            verb: Stands between the two where what is wrong does not begin with the address.
        """
        trouble = self.trouble or "it is in"
        if trouble.startswith(self.name):
            return trouble
        return f"{self.name}{verb}: {trouble.replace(self.name, 'it')}"

    @property
    def version(self) -> int | None:
        """Which weights it has; None: it was not heard yet, or they are called by no number."""
        name = self.state.weight_version if self.state is not None else ""
        if name == FIRST_VERSION:
            return 0
        return int(name) if name.isdecimal() else None

    async def look(self) -> ServerState:
        """Look at a server of whose memory nothing is to sleep: it may have failed to wake.

        Raises:
            EngineError: where it is not well.
        """
        await self.backend.wake(ALL_MEMORY)
        return await self.server.look()

    def note(self, state: ServerState) -> None:
        """Take note of what it tells; nothing sleeps of a process that is new."""
        if self.state is None or self.state.birth != state.birth:
            self.backend = SleepingBackend(self.server, can_sleep=state.can_sleep)
        self.state = state

    def end_calls(self) -> None:
        """End what runs on it with `ServerLostError`."""
        for patience in self.calls.values():
            if not patience.expired():
                patience.reschedule(0)
