"""The rank's side of rollout workers: spread requests over them, and take back the results.

`RolloutPool.run` drives one request, as `run_request` does in this process, so a `RolloutManager`
that gets it keeps its limits, order, retries and failure policy. Every rank has a pool over all
workers. A request goes to the least loaded one.

A worker that dies or hangs costs no sample: its requests begin again on other workers with the
same ids and seeds. Calls of the rank's own engine go on meanwhile. As long as such a request asks
for the same completions again, it gets those that were made, so with `rollout.deterministic` the
batch is the same to the last bit, also if workers die.
"""

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.engines.protocol import Completion, CompletionSource
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EngineError,
    Fault,
    WorkerLateError,
    WorkerLostError,
    words_of,
)
from agentrl.media.records import MediaSpan
from agentrl.plugins.cancellation import wait_despite_cancellation
from agentrl.rewards.managers import RewardManager, Scoring
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.transfer import Schemas, dump, load, load_results
from agentrl.tools.base import BaseTool
from agentrl.trainer.metrics.pools import Traffic
from agentrl.trainer.rollout_messages import (
    Call,
    Cancel,
    EndCall,
    Ended,
    Reply,
    RolloutConnection,
    Run,
    Scored,
    UseVersion,
    WorkerSettings,
)
from agentrl.trainer.rollout_worker import digest_schemas

NUM_LOST_TOGETHER = 2
"""A request that has lost so many workers is a suspect: it may be what ends them. From then on no
other suspect runs in the same worker, so that the innocent ones end."""
MAX_LOST = 5
"""A request that has lost so many workers fails."""
CANCEL_S = 60.0
"""Seconds that workers have to release the plug-ins of cancelled requests."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
WAIT_S = 300.0
"""If no worker is available, a request waits so many seconds for one, then it fails."""

logger = logging.getLogger(__name__)


_Generation = asyncio.Task[Completion]
"""One call of the rank's engine."""


@dataclass(eq=False, slots=True)
class _Job:
    """A request, and what the rank knows of its run in a worker."""

    request: AsyncRolloutRequest
    source: CompletionSource
    is_scored: bool
    data: bytes
    number: int = 0
    num_lost: int = 0
    """Workers that were lost while the request ran there."""
    known: list[int] = field(default_factory=list[int])
    """Tokens of its last call and of the completion."""
    media: tuple[MediaSpan, ...] = ()
    """The runs of placeholder tokens in them."""
    calls: dict[int, _Generation] = field(default_factory=dict[int, _Generation])
    """Calls of this run by number that the rank's engine has not answered."""
    made: list[tuple[Call, _Generation]] = field(default_factory=list[tuple[Call, _Generation]])
    """All calls of this run, in order."""
    repeated: deque[tuple[Call, _Generation]] = field(
        default_factory=deque[tuple[Call, _Generation]]
    )
    """Those of a lost run that were not asked for again yet. They may still be running."""
    ended: "asyncio.Future[bytes | BaseException]" = field(init=False)
    scored: "asyncio.Future[bytes | BaseException]" = field(init=False)

    def begin(self, number: int) -> None:
        """Begin to run, or begin again."""
        loop = asyncio.get_running_loop()
        self.number, self.known, self.media = number, [], ()
        self.calls.clear()
        self.repeated, self.made = deque([*self.made, *self.repeated]), []
        self.ended, self.scored = loop.create_future(), loop.create_future()

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ends workers."""
        return self.num_lost >= NUM_LOST_TOGETHER

    def lose(self, error: WorkerLostError) -> None:
        """End the run in a worker that is gone."""
        self.num_lost += 1
        for waiting in (self.ended, self.scored):
            if not waiting.done():
                waiting.set_result(error)

    def end_calls(self) -> list[_Generation]:
        """Abort its calls of the rank's engine, and return those that end now."""
        running = [task for _, task in (*self.made, *self.repeated) if not task.done()]
        for task in running:
            task.cancel()
        return running

    def generate(self, call: Call, ids: list[int], media: tuple[MediaSpan, ...]) -> _Generation:
        """Ask the rank's engine, or return what the same call of a lost run has started."""
        if self.repeated:
            before, task = self.repeated.popleft()
            if before[2:] != call[2:] or task.cancelled():
                self.end_calls()
                self.repeated.clear()
            else:
                return task
        generation = self.source.generate(
            ids, call.sampling, request_id=call.request_id, media=media
        )
        return asyncio.ensure_future(generation)


class _Link:
    """A rank's session with one worker.

    Args:
        connection: To the worker.
        settings: What the worker builds.
        digest: Digest of the schemas of the rank's tools.
    """

    def __init__(
        self, connection: RolloutConnection, settings: Callable[[], WorkerSettings], digest: str
    ) -> None:
        self.connection = connection
        self.jobs: dict[int, _Job] = {}
        self.session: str | None = None
        self.problem = "it was not opened"
        self.was_lost = False
        self.num_others = 0
        """Requests of other ranks that run there."""
        self.version: int | None = None
        self.traffic = Traffic()
        self._settings = settings
        self._digest = digest
        self._outbox: list[Any] = []
        self._sender: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Number of requests that run there."""
        return len(self.jobs) + self.num_others

    @property
    def num_suspects(self) -> int:
        """Number of requests there that may be what ends workers."""
        return sum(job.is_suspect for job in self.jobs.values())

    async def open(self) -> None:
        """Open a session.

        Raises:
            WorkerLostError: The worker is gone or late.
            AgentRLError: The worker cannot be built on its machine.
        """
        settings, session = self._settings(), uuid.uuid4().hex
        info = await self.connection.open(session, settings)
        if info.schemas_digest != self._digest:
            raise ConfigError(
                f"{self.connection.name} (on {info.host}) has other tools than the training rank",
                expected="the same plug-in files and tool servers on every node",
            )
        self.session, self.version, self.num_others = session, settings.version, 0

    def opening(self) -> "asyncio.Task[None]":
        """Return the task that opens a session again, as often as needed."""
        if _is_over(self._opening):
            self._opening = asyncio.create_task(self._open_again(), name=self.connection.name)
        assert self._opening is not None
        return self._opening

    async def _open_again(self) -> None:
        for attempt in itertools.count():
            try:
                await self.open()
            except (AgentRLError, OSError) as error:
                if self.problem != str(error) and not isinstance(error, WorkerLostError):
                    logger.warning("%s cannot be used: %s", self.connection.name, error)
                self.problem = str(error)
            else:
                if self.was_lost:
                    logger.warning("%s is available again", self.connection.name)
                return
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2**attempt, MAX_BACKOFF_S))

    def start(self, job: _Job, number: int) -> None:
        """Start to run a request; its futures have the results."""
        job.begin(number)
        self.jobs[number] = job
        self.post(Run(number, job.data, job.is_scored))
        if _is_over(self._receiver):
            self._receiver = asyncio.create_task(self._receive(), name="receive")

    def post(self, message: Any) -> None:
        """Send a message, together with others that are posted before the next call."""
        if self.session is None:
            return
        self._outbox.append(message)
        if _is_over(self._sender):
            self._sender = asyncio.create_task(self._send(), name="send")

    async def _send(self) -> None:
        session = self.session
        await asyncio.sleep(0)  # other tasks that are ready now may add messages
        while self._outbox and session is not None and session == self.session:
            messages, self._outbox = self._outbox, []
            try:
                data = dump(messages)
                await self.connection.send(session, data)
            except Exception as error:  # noqa: BLE001 - the messages did not arrive
                await self._lose(session, error)
            else:
                self.traffic = self.traffic._replace(sent=self.traffic.sent + len(data))

    async def _receive(self) -> None:
        session = self.session
        while self.jobs and session is not None and session == self.session:
            try:
                received = await self.connection.receive(session)
                messages = load(received.messages)
            except Exception as error:  # noqa: BLE001 - messages may be lost
                await self._lose(session, error)
                return
            size = self.traffic.received + len(received.messages)
            self.traffic = self.traffic._replace(received=size)
            for message in messages:
                self._handle(message)
            self.num_others = max(0, received.num_running - len(self.jobs))

    def _handle(self, message: Any) -> None:
        match message:
            case Call():
                if job := self.jobs.get(message.job):
                    self._generate(job, message)
            case EndCall():
                for job in self.jobs.values():
                    if generation := job.calls.get(message.call):
                        generation.cancel()
            case Ended():
                if job := self.jobs.get(message.job):
                    is_over = not job.is_scored or isinstance(message.results, BaseException)
                    _set(job.ended, message.results)
                    if is_over:
                        _set(job.scored, message.results)
                        del self.jobs[message.job]
            case Scored():
                if job := self.jobs.pop(message.job, None):
                    _set(job.scored, message.results)
            case _:
                raise TypeError(f"not a message of a worker: {message!r:.100}")

    def _generate(self, job: _Job, call: Call) -> None:
        """Let the rank's engine answer a call of a worker."""
        ids = job.known[: call.num_known] + call.new_ids.tolist()
        earlier = tuple(span for span in job.media if span.end <= call.num_known)
        media = earlier + call.media
        generation = job.calls[call.call] = job.generate(call, ids, media)
        job.made.append((call, generation))
        number = job.number

        def reply(done: _Generation) -> None:
            if job.number != number or job.ended.done():
                return  # the run that asked is lost or was cancelled
            job.calls.pop(call.call, None)
            result = _result_of(done)
            if isinstance(result, Completion):
                job.known, job.media = ids + result.token_ids, media
            self.post(Reply(call.call, result))

        generation.add_done_callback(reply)

    async def _lose(self, session: str, error: Exception) -> None:
        """Give up a session: its requests go to other workers."""
        if session != self.session:
            return
        self.session, self.problem, self.was_lost = None, words_of(error), True
        self._outbox.clear()
        jobs, self.jobs = list(self.jobs.values()), {}
        num_lost = sum(not job.ended.done() for job in jobs)
        logger.warning(
            "%s is lost (%s); its %d requests begin again on others",
            self.connection.name,
            str(error).partition("\n")[0],
            num_lost,
        )
        lost = error if isinstance(error, WorkerLostError) else WorkerLostError(words_of(error))
        for job in jobs:
            job.lose(lost)
        if isinstance(error, WorkerLateError):
            try:
                await self.connection.restart()
            except (AgentRLError, OSError) as failure:
                logger.warning("%s: %s", self.connection.name, failure)
        self.opening()

    async def close(self) -> None:
        """Close the session."""
        tasks = [self._sender, self._receiver, self._opening]
        for task in tasks:
            if task is not None and not _is_over(task):
                task.cancel()
        session, self.session = self.session, None
        if session is not None:
            try:
                await self.connection.close_session(session)
            except (AgentRLError, OSError) as error:
                logger.warning("%s did not close: %s", self.connection.name, error)


class RolloutPool:
    """Spreads a rank's requests over rollout workers.

    Args:
        connections: To the workers, which all ranks share.
        settings: What the workers build.
        tools: The rank's own tools; the workers must have the same.
        rank: Spreads the first requests of the ranks over different workers.
    """

    def __init__(
        self,
        connections: Sequence[RolloutConnection],
        settings: WorkerSettings,
        *,
        tools: Sequence[BaseTool],
        rank: int = 0,
    ) -> None:
        digest = digest_schemas(tools)
        self._settings = settings
        links = [_Link(one, lambda: self._settings, digest) for one in connections]
        first = rank % max(1, len(links))
        self._links = links[first:] + links[:first]
        self._schemas: Schemas = {tool.name: tool.tool_schema for tool in tools}
        self._numbers = itertools.count()
        self._num_scorings = 0
        self._unscored: dict[int, _Job] = {}

    async def open(self) -> None:
        """Open a session with every worker.

        Raises:
            WorkerLostError: A worker did not start.
            AgentRLError: A worker cannot be built on its machine.
        """
        results = await asyncio.gather(
            *(link.open() for link in self._links if link.session is None), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def use_version(self, version: int) -> None:
        """Send the version of new weights to each worker before its next request."""
        self._settings = replace(self._settings, version=version)

    @property
    def traffic(self) -> Traffic:
        """Bytes of all messages so far; what a lost worker did not get is not counted."""
        every = [link.traffic for link in self._links]
        return Traffic(sum(one.sent for one in every), sum(one.received for one in every))

    async def close(self) -> None:
        """Close all sessions; can be repeated."""
        await asyncio.gather(*(link.close() for link in self._links))

    async def run(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive a pending request to its end in a worker, in place (see `RunRequest`)."""
        is_scored = self._num_scorings > 0
        job = _Job(request, source, is_scored, dump(request))
        # In rounds, every request waits for all others: they cannot run one after the other.
        is_alone = source is context.engine
        while job.num_lost < MAX_LOST:
            try:
                link = await self._choose(job, is_alone=is_alone)
            except WorkerLostError as error:
                job.end_calls()
                _fail(request, error)
                return request
            except asyncio.CancelledError:
                await wait_despite_cancellation(job.end_calls())
                raise
            if link.version != self._settings.version:
                link.version = self._settings.version
                link.post(UseVersion(link.version))
            link.start(job, next(self._numbers))
            results = await self._wait(link, job)
            if not isinstance(results, WorkerLostError):
                self._take(job, results)
                return request
        job.end_calls()
        _fail(request, WorkerLostError(f"{MAX_LOST} workers were lost while the request ran there"))
        return request

    async def _choose(self, job: _Job, *, is_alone: bool) -> _Link:
        """Return the least loaded worker. If none is available, wait for one.

        Args:
            job: The request.
            is_alone: Whether a suspect waits for a worker without another one.

        Raises:
            WorkerLostError: No worker became available.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + WAIT_S
        while True:
            if found := [link for link in self._links if link.session is not None]:
                if not job.is_suspect:
                    return min(found, key=lambda link: link.load)
                link = min(found, key=lambda link: (link.num_suspects, link.load))
                if not (is_alone and link.num_suspects):
                    return link
                waiting = [one.ended for link in found for one in link.jobs.values()]
                await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                deadline = clock() + WAIT_S
                continue
            if clock() > deadline:
                raise WorkerLostError("no rollout worker is available", workers=self.describe())
            opening = [link.opening() for link in self._links]
            left_s = max(0.0, deadline - clock())
            await asyncio.wait(opening, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def describe(self) -> str:
        """Return each worker's name with its problem."""
        return "; ".join(
            f"{link.connection.name}: {'available' if link.session else link.problem}"
            for link in self._links
        )

    async def _wait(self, link: _Link, job: _Job) -> bytes | BaseException:
        """Wait for the end of a request. If the caller is cancelled, the request ends first."""
        try:
            await asyncio.wait([job.ended])
        except asyncio.CancelledError:
            await _cancel(link, job, job.ended)
            results = job.ended.result()
            if not isinstance(results, WorkerLostError):
                self._take(job, results)
            raise
        return job.ended.result()

    def _take(self, job: _Job, results: bytes | BaseException) -> None:
        request = job.request
        if isinstance(results, bytes):
            try:
                load_results(request, results, self._schemas)
            except Exception as error:  # noqa: BLE001 - classes of plug-ins may be missing here
                results = error
        if isinstance(results, BaseException):
            failure = describe_failure(results, Fault.TOOL, turn=len(request.turns))
            request.finish(StopReason.FAILED, failure)
        elif job.is_scored and request.state is RequestState.COMPLETED:
            self._unscored[id(request)] = job

    # Scores.

    @asynccontextmanager
    async def scoring(self, own: RewardManager) -> AsyncIterator[Scoring]:
        """Let the workers score the requests that run during the block.

        Args:
            own: Scores a request here if its worker is lost after the request has ended.
        """
        scores = _WorkerScoring(self, own)
        self._num_scorings += 1
        try:
            yield scores
        finally:
            self._num_scorings -= 1
            self._unscored.clear()
            await scores.cancel()

    def take_unscored(self, request: AsyncRolloutRequest) -> _Job | None:
        """Return the job of a request that a worker scores; once."""
        return self._unscored.pop(id(request), None)

    def link_of(self, job: _Job) -> _Link | None:
        """Return the worker that runs a job."""
        return next((link for link in self._links if link.jobs.get(job.number) is job), None)


class _WorkerScoring:
    """The scores of one batch (see `Scoring`)."""

    def __init__(self, pool: RolloutPool, own: RewardManager) -> None:
        self._pool = pool
        self._own = own
        self._jobs: list[_Job] = []
        self._rest: list[AsyncRolloutRequest] = []

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Record that a request has ended; its worker scores it already."""
        job = self._pool.take_unscored(request)
        if job is not None:
            self._jobs.append(job)
        elif request.state is RequestState.COMPLETED:
            self._rest.append(request)

    async def done(self) -> None:
        """Wait until all scores have arrived; compute those here that were lost."""
        jobs, self._jobs = self._jobs, []
        try:
            if jobs:
                await asyncio.wait([job.scored for job in jobs])
        except asyncio.CancelledError:
            self._jobs = jobs
            raise
        for job in jobs:
            self._take(job)
        if self._rest:
            await self._own.score(self._rest)

    def _take(self, job: _Job) -> None:
        request, results = job.request, job.scored.result()
        if isinstance(results, bytes):
            load_results(request, results, {})
        elif isinstance(results, WorkerLostError):
            self._rest.append(request)
        elif request.state is RequestState.COMPLETED:
            failure = describe_failure(results, Fault.REWARD, turn=len(request.turns))
            request.fail_scoring(failure)

    async def cancel(self) -> None:
        """Cancel the scores that have not arrived."""
        for job in self._jobs:
            if (link := self._pool.link_of(job)) is not None:
                await _cancel(link, job, job.scored)


class WorkerScores:
    """The reward manager of a rank with workers that score each request by itself.

    Args:
        pool: The workers.
        own: The rank's own manager. It scores what workers have lost.
    """

    def __init__(self, pool: RolloutPool, own: RewardManager) -> None:
        self._pool = pool
        self._own = own

    def scoring(self, requests: Sequence[AsyncRolloutRequest]) -> Any:
        """Open the scoring of one batch; see `StreamingRewardManager.scoring`."""
        return self._pool.scoring(self._own)

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score requests in this process; see `RewardManager.score`."""
        await self._own.score(requests)

    async def close(self) -> None:
        """Release what the scorers share."""
        await self._own.close()


async def _cancel(link: _Link, job: _Job, result: "asyncio.Future[Any]") -> None:
    """Cancel a request or its score, and wait for its result, but not forever."""
    calls = job.end_calls()
    link.post(Cancel(job.number))
    late = WorkerLateError(f"{link.connection.name} did not end a request within {CANCEL_S:g} s")
    clock = asyncio.get_running_loop().call_later(CANCEL_S, job.lose, late)
    try:
        await wait_despite_cancellation([result, *calls])
    finally:
        clock.cancel()
        link.jobs.pop(job.number, None)


def _fail(request: AsyncRolloutRequest, error: WorkerLostError) -> None:
    request.finish(StopReason.FAILED, describe_failure(error, Fault.ENGINE, turn=0))


def _set(waiting: "asyncio.Future[Any]", result: Any) -> None:
    if not waiting.done():
        waiting.set_result(result)


def _is_over(task: "asyncio.Task[None] | None") -> bool:
    """Whether a task ended, or belongs to an event loop that ended."""
    return task is None or task.done() or task.get_loop() is not asyncio.get_running_loop()


def _result_of(generation: _Generation) -> Completion | BaseException:
    """Return what a worker may receive: errors that cannot be pickled are described."""
    if generation.cancelled():
        return EngineError("the engine cancelled the call")
    error = generation.exception()
    if error is None:
        return generation.result()
    try:
        load(dump(error))
    except Exception:  # noqa: BLE001 - pickling runs the code of users' exceptions
        return EngineError(words_of(error))
    return error
