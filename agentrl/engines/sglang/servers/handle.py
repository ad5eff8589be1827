"""One server of a pool: whether it gets calls, what runs on it, what it told last."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.engines.protocol import ALL_MEMORY
from agentrl.engines.sglang.backend import SleepingBackend
from agentrl.engines.sglang.calls import FIRST_VERSION
from agentrl.engines.sglang.servers.client import ServerState, SGLangServer

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


HALF_UPDATED = "an update of its weights has not gone through whole: the next one mends it"


def unfitness(
    state: ServerState,
    member: Member,
    members: Sequence[Member],
    *,
    max_model_len: int,
    run: int | None,
) -> str | None:
    """Say why a server that answers is to get no calls; None: it may.

    Args:
        state: What it said.
        member: The server.
        members: All of the pool, whose weights are to be the same.
        max_model_len: Most tokens of a sequence of the run.
        run: Version of the weights that the run sent last; None: it has sent none.
    """
    if state.max_input_tokens < max_model_len - 1:
        return (
            f"it takes inputs of at most {state.max_input_tokens} tokens, the run needs "
            f"{max_model_len - 1} (its --context-length and --max-total-tokens)"
        )
    if member.broken_weights is not None:
        return member.broken_weights
    if state.is_half_updated:
        return HALF_UPDATED
    if run is None:
        newest = max((m.version for m in members if m.version is not None), default=None)
        if member.version == newest:
            return None
        return f"it has weights of version {state.weight_version}, another has {newest}"
    if (member.synced_birth, f"{run}") != (state.birth, state.weight_version):
        return (
            f"it has weights of its own (version {state.weight_version}), the others those of "
            f"the run (version {run}): the next update mends it"
        )
    return None


MAX_HOMES = 1 << 16
"""Conversations whose server is remembered; those not heard of for longest are forgotten."""


class Homes:
    """The servers of conversations."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Member] = OrderedDict()

    def choose(
        self, request_id: str, members: Sequence[Member], *, avoid: Sequence[Member] = ()
    ) -> Member | None:
        """Choose the server that knows the conversation, else the least loaded.

        Args:
            request_id: The conversation's.
            members: Of which those that are in are asked.
            avoid: Taken only where nobody else is in.

        Returns:
            None where nobody is in.
        """
        home = self._found.pop(request_id, None)
        if home is None or not home.is_in or home in avoid:
            able = [member for member in members if member.is_in]
            if not able:
                return None
            home = min(able, key=lambda m: (m in avoid, len(m.calls), m.num_homes))
            home.num_homes += 1
        self._found[request_id] = home
        if len(self._found) > MAX_HOMES:
            self._found.popitem(last=False)
        return home
