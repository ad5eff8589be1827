"""`RolloutWorker`: runs requests of training ranks in a process of its own.

A worker builds its own tokenizer, template, plug-ins and scorers from the run's configuration, and
loads no model. A rank opens a session and sends requests; the worker returns each one when it has
ended, and its score later (see `rollout_messages`). Completions come from the SGLang servers, or
from the engine of the rank that owns the request.
"""

import asyncio
import hashlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    CompletionSource,
    Engine,
    EngineCall,
    FollowsUpdates,
    MemoryTag,
    SamplingParams,
    SyncFigures,
)
from agentrl.engines.sglang.servers.factory import connect_client
from agentrl.errors import AgentRLError, EngineError, WorkerLostError, words_of
from agentrl.media.records import MediaSpan
from agentrl.plugins.cancellation import is_cancelled, wait_despite_cancellation
from agentrl.plugins.watchdog import LoopWatchdog
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scheduling import rare_gc
from agentrl.rollout.transfer import (
    Schemas,
    dump,
    dump_inputs,
    dump_results,
    dump_score,
    load,
    pack_ids,
)
from agentrl.tools.base import BaseTool
from agentrl.trainer.rollout_messages import (
    Call,
    Cancel,
    EndCall,
    Ended,
    Received,
    Reply,
    Run,
    Scored,
    UseVersion,
    WorkerInfo,
    WorkerSettings,
)
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import Plugins, import_plugins, load_plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

if TYPE_CHECKING:
    import torch

HEARTBEAT_S = 5.0
"""`receive` waits at most so long for messages."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What all requests of a worker share."""

    plugins: Plugins
    manager: RolloutManager
    max_concurrent_scores: int

    @property
    def schemas(self) -> Schemas:
        """The schemas of the tools by name."""
        return {tool.name: tool.tool_schema for tool in self.plugins.tools}


def digest_schemas(tools: Sequence[BaseTool]) -> str:
    """Return a digest of the tools' schemas, in their order."""
    texts = [tool.tool_schema.model_dump_json() for tool in tools]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def build_parts(settings: WorkerSettings) -> WorkerParts:
    """Build tokenizer, template, plug-ins and manager, and connect to the servers if needed.

    Raises:
        AgentRLError: A file or plug-in of the run is missing or wrong on this machine.
    """
    quiet_libraries()
    config = settings.config
    import_plugins(config.plugins)
    plugins = load_plugins(config, settings.remotes)
    setup = make_rollout_setup(config, plugins, probe_model(config, plugins, now=settings.now))
    engine: Engine = RankEngine(settings.max_model_len)
    if settings.asks_servers:
        servers = config.rollout.engine.sglang_server
        engine = connect_client(
            servers, setup.tokenizer, settings.directory, max_model_len=settings.max_model_len
        )
    return WorkerParts(
        plugins=plugins,
        manager=make_manager(config, setup, engine),
        max_concurrent_scores=config.reward.max_concurrent_scores,
    )


class RankEngine:
    """Stands for the engine of the ranks: it has its limits, and each request has its own source.

    Args:
        max_model_len: Most tokens of a sequence.
    """

    is_shared = False

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Refuse: the request's own source knows its rank."""
        self._refuse()

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Refuse: only a rank runs rounds."""
        self._refuse()

    async def abort(self, request_id: str) -> None:
        """Do nothing: a call is aborted through its source."""

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Refuse: only ranks have weights."""
        self._refuse()

    async def flush_cache(self) -> None:
        """Refuse: the rank's engine has the cache."""
        self._refuse()

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Refuse: the rank's engine has the memory."""
        self._refuse()

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Refuse: the rank's engine has the memory."""
        self._refuse()

    async def close(self) -> None:
        """Do nothing."""

    def _refuse(self) -> NoReturn:
        raise EngineError(
            "a rollout worker has no engine of its own",
            expected="calls of the source that the request was given",
        )


class _RankSource:
    """The `CompletionSource` of one request: its calls are answered by the rank.

    The rank knows the tokens of the last call and its completion. Each call sends only the tokens
    after those, so that a conversation does not travel once for each turn.
    """

    def __init__(self, session: "_Session", job: int) -> None:
        self._session = session
        self._job = job
        self._known: list[int] = []
        self._num_waiting = 0
        self._is_parallel = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Ask the rank. Cancelling aborts the call there.

        Raises:
            BaseException: What the rank's engine raised.
        """
        ids, known = list(input_ids), self._known
        # Calls at the same time end in any order: both sides would know different tokens.
        self._is_parallel = self._is_parallel or self._num_waiting > 0
        can_extend = not self._is_parallel and ids[: len(known)] == known
        num_known = len(known) if can_extend else 0
        self._num_waiting += 1
        try:
            new = tuple(span for span in media if span.end > num_known)
            number = next(self._session.numbers)
            completion = await self._session.ask(
                Call(
                    number, self._job, num_known, pack_ids(ids[num_known:]), sampling, request_id,
                    new,
                )
            )  # fmt: skip
        finally:
            self._num_waiting -= 1
        self._known = ids + completion.token_ids
        return completion


@dataclass(slots=True)
class _Job:
    """A request of a session."""

    task: "asyncio.Task[None]"
    is_cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Session:
    """A rank's requests in this worker."""

    name: str
    silence_s: float
    outbox: list[Any] = field(default_factory=list[Any])
    has_messages: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: dict[int, _Job] = field(default_factory=dict[int, _Job])
    calls: dict[int, "asyncio.Future[Completion]"] = field(
        default_factory=dict[int, "asyncio.Future[Completion]"]
    )
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    heard_at: float = field(default_factory=time.monotonic)
    num_waiting: int = 0
    """`receive` calls that wait."""
    is_closed: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether the rank has not called for too long, although it has requests here."""
        quiet_s = time.monotonic() - self.heard_at
        return bool(self.jobs) and not self.num_waiting and quiet_s > self.silence_s

    def post(self, message: Any) -> None:
        """Add a message for the rank."""
        if not self.is_closed:
            self.outbox.append(message)
            self.has_messages.set()

    async def ask(self, call: Call) -> Completion:
        """Send a call to the rank and wait for its reply."""
        if self.is_closed:
            raise EngineError("the rank of this request is gone")
        number = call.call
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.calls[number] = reply
        self.post(call)
        try:
            return await reply
        except asyncio.CancelledError:
            if is_cancelled() and (reply.cancelled() or not reply.done()):
                self.post(EndCall(number))
            raise
        finally:
            del self.calls[number]

    def cancel(self, job: int) -> None:
        """Cancel a request or its score, once."""
        found = self.jobs.get(job)
        if found is not None and not found.is_cancelled:
            found.is_cancelled = True
            found.task.cancel()


class RolloutWorker:
    """Runs requests of any number of ranks. Its methods are those of `RolloutConnection`.

    Args:
        name: For log messages.
        build: Builds what requests need.
    """

    def __init__(
        self,
        name: str = "rollout worker",
        build: Callable[[WorkerSettings], WorkerParts] = build_parts,
    ) -> None:
        self._name = name
        self._build = build
        self._parts: WorkerParts | None = None
        self._version: int | None = None
        self._sessions: dict[str, _Session] = {}
        self._building = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._scores: asyncio.Semaphore | None = None
        self._guard: asyncio.Task[None] | None = None
        self._running = ExitStack()
        self._num_running = 0

    # Called by ranks.

    async def open(self, session: str, settings: WorkerSettings) -> WorkerInfo:
        """Build what requests need, unless it exists, and open a session; can be repeated.

        Raises:
            AgentRLError: It cannot be built on this machine.
        """
        async with self._building:
            if self._parts is None:
                self._parts = self._build(settings)
                self._scores = asyncio.Semaphore(self._parts.max_concurrent_scores)
        self._sessions[session] = _Session(session, settings.silence_s)
        await self._use_version(settings.version)
        if self._guard is None or self._guard.done():
            self._guard = asyncio.create_task(self._close_silent_sessions())
        digest = digest_schemas(self._parts.plugins.tools)
        return WorkerInfo(host=socket.gethostname(), pid=os.getpid(), schemas_digest=digest)

    async def send(self, session: str, messages: bytes) -> None:
        """Take messages of a rank.

        Raises:
            WorkerLostError: The session is unknown: this worker replaces the one that knew it.
        """
        known = self._session(session)
        known.heard_at = time.monotonic()
        for message in load(messages):
            match message:
                case Run():
                    task = asyncio.create_task(self._run(known, message))
                    known.jobs[message.job] = _Job(task)
                case Cancel():
                    await asyncio.sleep(0)  # a task that has not begun would end without a result
                    known.cancel(message.job)
                case Reply():
                    _set_reply(known.calls.get(message.call), message.result)
                case UseVersion():
                    await self._use_version(message.version)
                case _:
                    raise TypeError(f"not a message of a rank: {message!r:.100}")

    async def receive(self, session: str) -> Received:
        """Return the messages for a rank, as soon as there are any.

        Raises:
            WorkerLostError: As for `send`.
        """
        known = self._session(session)
        known.num_waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await known.has_messages.wait()
            await asyncio.sleep(0)  # other tasks that are ready now may add messages
        finally:
            known.num_waiting -= 1
            known.heard_at = time.monotonic()
        messages, known.outbox = known.outbox, []
        known.has_messages.clear()
        return Received(dump(messages), self._num_running)

    async def close_session(self, session: str) -> None:
        """Close a session: its requests end, and their plug-ins are released.

        After the last session the plug-ins of the run are shut down. A later `open` builds others.
        """
        if known := self._sessions.pop(session, None):
            await _end_session(known)
        if not self._sessions:
            async with self._building:
                parts, self._parts = self._parts, None
                if parts is not None:
                    await parts.plugins.shutdown()
                    await parts.manager.context.engine.close()

    async def close(self) -> None:
        """Close all sessions, before the process ends."""
        for session in list(self._sessions):
            await self.close_session(session)

    def load(self) -> dict[str, int]:
        """Return figures for the heartbeats of the process."""
        return {"requests": self._num_running, "sessions": len(self._sessions)}

    # Requests.

    async def _run(self, session: _Session, message: Run) -> None:
        """Drive one request, send its results, and score it."""
        parts = self._parts
        assert parts is not None, "a session is open"
        self._enter()
        try:
            request: AsyncRolloutRequest = load(message.request)
            inputs = dump_inputs(request)
            with suppress(asyncio.CancelledError):  # the request has ended then, as ABORTED
                source = self._source(session, message.job)
                request = await parts.manager.drive_once(request, source)
            session.post(Ended(message.job, dump_results(request, inputs, parts.schemas)))
        except Exception as error:  # noqa: BLE001 - plug-ins may leave anything in a request
            session.post(Ended(message.job, _unsendable(error)))
        else:
            if message.is_scored:
                session.post(Scored(message.job, await self._score(parts, request)))
        finally:
            session.jobs.pop(message.job, None)
            self._leave()

    async def _score(
        self, parts: WorkerParts, request: AsyncRolloutRequest
    ) -> bytes | BaseException:
        assert self._scores is not None, "a session is open"
        try:
            with suppress(asyncio.CancelledError):
                async with self._scores:
                    await parts.plugins.rewards.score([request])
            return dump_score(request)
        except Exception as error:  # noqa: BLE001 - scorers may return anything
            return _unsendable(error)

    def _source(self, session: _Session, job: int) -> CompletionSource:
        assert self._parts is not None, "a session is open"
        engine = self._parts.manager.context.engine
        return _RankSource(session, job) if isinstance(engine, RankEngine) else engine

    def _enter(self) -> None:
        """Watch the event loop while requests run, and collect garbage rarely."""
        if not self._num_running:
            self._running.enter_context(LoopWatchdog())
            self._running.enter_context(rare_gc())
        self._num_running += 1

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._running.close()

    async def _use_version(self, version: int) -> None:
        """Learn which servers have the run's weights, once for each version."""
        async with self._updating:
            if version == self._version or self._parts is None:
                return
            engine = self._parts.manager.context.engine
            if isinstance(engine, FollowsUpdates):
                try:
                    await engine.follow_update(version=version)
                except EngineError as error:  # each request that calls it fails with the reason
                    logger.warning("%s: %s", self._name, error)
            self._version = version

    # Sessions.

    def _session(self, name: str) -> _Session:
        try:
            return self._sessions[name]
        except KeyError:
            raise WorkerLostError(f"{self._name} was replaced or has closed the session") from None

    async def _close_silent_sessions(self) -> None:
        """End the requests of ranks that are gone, as long as there are sessions."""
        while self._sessions:
            await asyncio.sleep(HEARTBEAT_S)
            for session in [one for one in self._sessions.values() if one.is_silent]:
                logger.warning(
                    "%s: a rank has not called for %.0f s: its %d requests are aborted",
                    self._name,
                    session.silence_s,
                    len(session.jobs),
                )
                self._sessions.pop(session.name, None)
                await _end_session(session)


async def _end_session(session: _Session) -> None:
    session.is_closed = True
    await asyncio.sleep(0)
    tasks = [job.task for job in session.jobs.values()]
    for job in list(session.jobs):
        session.cancel(job)
    await wait_despite_cancellation(tasks)


def _unsendable(error: Exception) -> AgentRLError:
    return AgentRLError(
        f"the request cannot be sent from a rollout worker: {words_of(error)}",
        expected="plug-ins that leave plain values in rewards, metadata and messages",
    )


def _set_reply(
    waiting: "asyncio.Future[Completion] | None", result: Completion | BaseException
) -> None:
    if waiting is None or waiting.done():
        return
    if isinstance(result, BaseException):
        waiting.set_exception(result)
    else:
        waiting.set_result(result)
