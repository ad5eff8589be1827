"""One server of a pool, whether it may get calls, and which server a conversation uses."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.engines.protocol import ALL_MEMORY
from agentrl.engines.sglang.backend import SleepingBackend
from agentrl.engines.sglang.calls import FIRST_VERSION
from agentrl.engines.sglang.servers.client import ServerClient, ServerState

NOT_CHECKED = "it was not checked yet"
HALF_UPDATED = "an update of its weights is incomplete: the next update repairs it"
MAX_CONVERSATIONS = 1 << 16
"""Most conversations with a known server; the least recently used are forgotten."""


@dataclass(eq=False, slots=True)
class ServerHandle:
    """One server of the pool."""

    client: ServerClient
    problem: str | None = NOT_CHECKED
    """Why it gets no calls; None: it is available."""
    calls: dict[str, asyncio.Timeout] = field(default_factory=dict[str, asyncio.Timeout])
    """Its running calls by their name inside SGLang; the timeout ends the call here."""
    num_conversations: int = 0
    """Conversations that were assigned to it."""
    answered_at: float = 0.0
    """When it last answered a call (monotonic)."""
    num_failures: int = 0
    """Failures since it last answered a call."""
    state: ServerState | None = None
    """What it last reported."""
    synced_start_id: str | None = None
    """The process that has taken the pool's last update; None: none has."""
    weights_problem: str | None = None
    """Why its weights are incomplete; None: they are complete."""
    check: asyncio.Task[None] | None = None
    """The health check that runs."""
    watcher: asyncio.Task[None] | None = None
    """Checks its health until the pool is closed or a cluster has replaced the server."""
    num_other_calls: int = 0
    """Calls of other clients that it last reported."""
    is_owned: bool = False
    """Whether it was started for this run alone, so that the versions of its weights are the
    run's."""
    backend: SleepingBackend = field(init=False)
    """Sends control requests, and knows which of its memory sleeps."""

    def __post_init__(self) -> None:
        self.backend = SleepingBackend(self.client, can_sleep=False)

    @property
    def name(self) -> str:
        """The server's address."""
        return self.client.name

    @property
    def is_available(self) -> bool:
        """Whether it gets calls."""
        return self.problem is None

    def describe(self, verb: str = "") -> str:
        """Return its address and its problem, with the address once.

        Args:
            verb: Follows the address if the problem does not begin with the address.
        """
        problem = self.problem or "it is available"
        if problem.startswith(self.name):
            return problem
        return f"{self.name}{verb}: {problem.replace(self.name, 'it')}"

    @property
    def version(self) -> int | None:
        """The version of its weights; None if it is unknown or not a number."""
        name = self.state.weight_version if self.state is not None else ""
        if name == FIRST_VERSION:
            return 0
        return int(name) if name.isdecimal() else None

    async def check_health(self) -> ServerState:
        """Check a server that should be awake. Wake it first, in case an earlier wake failed.

        Raises:
            EngineError: The server is not healthy.
        """
        await self.backend.wake(ALL_MEMORY)
        return await self.client.check_health()

    def update_state(self, state: ServerState) -> None:
        """Store what it reports. In a new process, no memory sleeps."""
        if self.state is None or self.state.start_id != state.start_id:
            self.backend = SleepingBackend(self.client, can_sleep=state.can_sleep)
        self.state = state
        self.num_other_calls = max(0, state.num_calls - len(self.calls))

    def end_calls(self) -> None:
        """End its running calls with `ServerLostError`."""
        for timeout in self.calls.values():
            if not timeout.expired():
                timeout.reschedule(0)

    def unavailable_reason(
        self, servers: "Sequence[ServerHandle]", *, max_model_len: int, run_version: int | None
    ) -> str | None:
        """Return why a server that answers must get no calls; None: it may get calls.

        Args:
            servers: All servers of the pool; their weights must be the same.
            max_model_len: Most tokens of a sequence of the run.
            run_version: Version of the weights that the run sent last; None: it has sent none.
        """
        assert self.state is not None, "its state was queried before"
        if self.state.max_input_tokens < max_model_len - 1:
            return (
                f"it takes inputs of at most {self.state.max_input_tokens} tokens, the run needs "
                f"{max_model_len - 1} (its --context-length and --max-total-tokens)"
            )
        if self.weights_problem is not None:
            return self.weights_problem
        if self.state.is_half_updated:
            return HALF_UPDATED
        current = self.state.weight_version
        if run_version is None:
            newest = max((s.version for s in servers if s.version is not None), default=None)
            if self.version == newest:
                return None
            return f"it has weights of version {current}, another server has {newest}"
        is_process = self.is_owned or self.synced_start_id == self.state.start_id
        if not is_process or f"{run_version}" != current:
            return (
                f"it has weights of version {current} that are not the run's (version "
                f"{run_version}): the next update repairs it"
            )
        return None


class StickyRouter:
    """Keeps each conversation on one server, because that radix cache has its beginning.

    Several clients share the servers, and each knows only its own calls. A server's load is the
    client's own calls plus those of the others that the server last reported. Equal servers are
    ordered by a hash of conversation and server, so that not all clients prefer the same one.
    """

    def __init__(self) -> None:
        self._servers: OrderedDict[str, ServerHandle] = OrderedDict()

    def choose(
        self,
        request_id: str,
        servers: Sequence[ServerHandle],
        *,
        avoid: Sequence[ServerHandle] = (),
    ) -> ServerHandle | None:
        """Return the server of the conversation, or the least loaded one for a new conversation.

        Args:
            request_id: The conversation's.
            servers: The available ones are candidates.
            avoid: Chosen only if no other server is available.

        Returns:
            None if no server is available.
        """
        server = self._servers.pop(request_id, None)
        if server is None or not server.is_available or server in avoid:
            candidates = [
                (
                    server in avoid,
                    len(server.calls) + server.num_other_calls,
                    server.num_conversations,
                    _hash(f"{index}|{request_id}"),
                    index,
                )
                for index, server in enumerate(servers)
                if server.is_available
            ]
            if not candidates:
                return None
            server = servers[min(candidates)[-1]]
            server.num_conversations += 1
        self._servers[request_id] = server
        if len(self._servers) > MAX_CONVERSATIONS:
            self._servers.popitem(last=False)
        return server


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()
