"""What a training rank and a rollout worker send each other, and the connection between them.

    rank                                worker
    Run, Cancel, Reply, UseVersion  ->
                                    <-  Call, EndCall, Ended, Scored

Only the rank calls: `send` brings messages to the worker, and `receive` waits until the worker has
some. Messages that accumulate while a call is on its way travel together in the next one, so the
cost of a remote call is shared by more requests the busier both sides are.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from agentrl.config.schema.run import RunConfig
from agentrl.engines.protocol import Completion, SamplingParams
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.media.records import MediaSpan
from agentrl.plugins.remote import RemoteObject, Remotes


class Run(NamedTuple):
    """Drive a request."""

    job: int
    request: bytes
    """The pending request (`agentrl.rollout.transfer.dump`)."""
    is_scored: bool
    """Whether the worker also scores it."""


class Cancel(NamedTuple):
    """Abort a request and release its plug-ins, or stop its score. The answer is `Ended`."""

    job: int


class Reply(NamedTuple):
    """The result of a `Call`."""

    call: int
    result: Completion | BaseException


class UseVersion(NamedTuple):
    """The servers have new weights. It comes before the requests that they sample."""

    version: int


class Call(NamedTuple):
    """Ask the rank's engine for a completion."""

    call: int
    job: int
    num_known: int
    """Input tokens that the rank knows from the last call of the request and its completion."""
    new_ids: Any
    """The input tokens after these, as an array."""
    sampling: SamplingParams
    request_id: str
    media: tuple[MediaSpan, ...] = ()
    """The runs of placeholder tokens among the new tokens, in order."""


class EndCall(NamedTuple):
    """The worker waits no more for a call."""

    call: int


class Ended(NamedTuple):
    """A request has ended."""

    job: int
    results: bytes | BaseException
    """From `dump_results`; an error if they cannot be sent."""


class Scored(NamedTuple):
    """A request was scored, or its score was cancelled."""

    job: int
    results: bytes | BaseException
    """From `dump_score`; an error if it cannot be sent."""


class Received(NamedTuple):
    """What `receive` returns."""

    messages: bytes
    """A list of messages (`agentrl.rollout.transfer.dump`); it may be empty."""
    num_running: int
    """Requests that run in the worker, of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker needs to build its tokenizer, template and plug-ins."""

    config: RunConfig
    now: datetime | None
    """Date for templates that write one."""
    max_model_len: int
    """Of the rank's engine."""
    asks_servers: bool
    """Whether the worker calls the SGLang servers itself; else the rank's engine answers."""
    directory: ServerDirectory | None = None
    """Servers that the run's cluster starts; None: those of the configuration."""
    version: int
    """Policy version of the servers' weights."""
    silence_s: float
    """A session that does not receive for so many seconds is closed: its rank is gone."""
    remotes: Remotes = field(default_factory=dict[str, RemoteObject])
    """Tools and scorers that run in processes with their `resources`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that is ready."""

    host: str
    pid: int
    schemas_digest: str
    """Digest of the schemas of its tools."""


class RolloutConnection(Protocol):
    """One rollout worker, as a rank sees it. Every method has a time limit.

    The worker may be replaced by a new process at any time. It then knows no session.

    Raises:
        WorkerLostError: From every method: the worker is gone, is late, or was replaced.
    """

    name: str
    """For messages to users."""

    async def open(self, session: str, settings: WorkerSettings) -> WorkerInfo:
        """Build what the worker needs, unless it exists, and open a session.

        Raises:
            AgentRLError: It cannot be built on the worker's machine.
        """
        ...

    async def send(self, session: str, messages: bytes) -> None:
        """Deliver a list of messages."""
        ...

    async def receive(self, session: str) -> Received:
        """Wait for messages, but not long: an answer without any shows that the worker lives."""
        ...

    async def close_session(self, session: str) -> None:
        """End the session's requests; after the last session, shut the plug-ins down."""
        ...

    async def restart(self) -> None:
        """End a worker that does not answer, so that it is started again."""
        ...
