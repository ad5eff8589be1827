"""The session of one request: its key, its calls in progress, its limits, and what it reported."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from pydantic import Field

from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply
from agentrl.agent_loops.gateway.dialect import Body, read_body
from agentrl.agent_loops.gateway.limits import is_large
from agentrl.agent_loops.gateway.trajectory import Point, Trajectory
from agentrl.config.schema.agent import GatewayConfig
from agentrl.plugins.cancellation import wait_despite_cancellation
from agentrl.rollout.states import StopReason

T = TypeVar("T")
OPEN_PER_CALL = 4
"""HTTP requests of an agent that may be open, for each call that may run: repetitions wait too."""
BODIES_AT_ONCE = 2
"""Bodies of the largest size that an agent may have in progress."""


class GatewaySettings(GatewayConfig):
    """The keys of `rollout.agent.gateway`, and where the gateway listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""

    @classmethod
    def of(cls, config: GatewayConfig, *, host: str = "127.0.0.1", port: int = 0) -> Self:
        """Add an address to the keys of a run file."""
        return cls(host=host, port=port, **config.model_dump())


MAX_REWARD = 1e300
"""Larger rewards of agents are errors: their sums would not be finite."""


class _Reward(Body):
    reward: float = Field(strict=True, gt=-MAX_REWARD, lt=MAX_REWARD)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that samples, or has sampled, for one body of a client."""

    task: asyncio.Task[tuple[ChatReply, Point]]
    idempotency_key: str | None
    num_clients: int = 0
    """Connections that do not have the whole answer yet."""
    is_delivered: bool = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a connection, until it has the whole answer or is closed."""
        self.num_clients += 1
        try:
            yield
        finally:
            self.num_clients -= 1

    async def wait(self) -> ChatReply:
        """Wait for the reply. Cancelling this does not cancel the call."""
        reply, _ = await asyncio.shield(self.task)
        return reply

    def confirm(self) -> None:
        """Note that a client got the whole answer."""
        self.is_delivered = True
        _, point = self.task.result()
        point.is_delivered = True

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a completion."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class GatewaySession:
    """One request, for as long as its agent runs.

    Attributes:
        key: Names the request in every call.
        reported_reward: The last reward that the agent posted; None if it posted none.
        reported: The whole body of that post.
    """

    def __init__(
        self, key: str, address: str, trajectory: Trajectory, settings: GatewaySettings
    ) -> None:
        self.key = key
        self.reported_reward: float | None = None
        self.reported: dict[str, Any] = {}
        self._address = address
        self._trajectory = trajectory
        self._settings = settings
        self._calls: dict[bytes, list[PendingCall]] = {}
        self._running: set[asyncio.Task[tuple[ChatReply, Point]]] = set()
        self._num_calls = self._num_open = self._num_bytes = 0

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI's API."""
        return f"{self._address}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for clients of Anthropic's API, which add `/v1` themselves."""
        return self._address

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which clients find the gateway."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self._settings.model_name,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            "ANTHROPIC_MODEL": self._settings.model_name,
            "AGENTRL_BASE_URL": self._address,
            "AGENTRL_API_KEY": self.key,
            "AGENTRL_REWARD_URL": f"{self._address}/reward",
            "AGENTRL_MODEL": self._settings.model_name,
        }

    @property
    def stop_reason(self) -> StopReason:
        """How the trajectory ends if the agent ends now: the budget that cut it, or ANSWERED."""
        return self._trajectory.cut or StopReason.ANSWERED

    @property
    def error(self) -> Exception | None:
        """Why the engine failed in the last call; None if it did not."""
        return self._trajectory.error

    @property
    def counts(self) -> Counter[str]:
        """Calls, sequences, differences and cuts so far; also in the request's metrics."""
        return self._trajectory.counts

    @contextmanager
    def opened(self) -> Iterator[Callable[[int], None]]:
        """Count an HTTP request of the agent until its answer; yield what adds its bytes.

        Raises:
            CallError: If the agent has too many requests, or too many bytes, at the same time.
        """
        limit = OPEN_PER_CALL * self._settings.max_concurrent_calls
        if self._num_open >= limit:
            raise self._refuse(f"{limit} requests of this key are open", "too_many_calls")
        num_bytes = 0

        def add(number: int) -> None:
            nonlocal num_bytes
            most = BODIES_AT_ONCE * self._settings.max_body_bytes
            if self._num_bytes + number > most:
                raise self._refuse(
                    f"the requests of this key have more than {most} bytes", "too_many_bytes"
                )
            num_bytes += number
            self._num_bytes += number

        self._num_open += 1
        try:
            yield add
        finally:
            self._num_open -= 1
            self._num_bytes -= num_bytes

    def _refuse(self, reason: str, code: str, status: int = 429) -> CallError:
        self.counts["refused_calls"] += 1
        hint = "; wait for one of them to end" if status == 429 else ""
        return CallError(reason + hint, status=status, code=code)

    async def read(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Read a body; a large one on the agent's thread.

        Raises:
            CallError: If it is not valid.
        """
        if is_large(body):
            return await self._trajectory.thread.run(partial(read, body))
        return read(body)

    async def write(self, write: Callable[[], T], call: ChatCall) -> T:
        """Write an answer; that of a large call, which may repeat it, on the agent's thread."""
        return await self._trajectory.thread.run(write) if call.is_large else write()

    def start(self, call: ChatCall, digest: bytes, headers: Mapping[str, str]) -> PendingCall:
        """Start a call, or return the call of which this one is a repetition.

        A client repeats a call if it gave up waiting or lost the connection. The same body is a
        repetition if its `Idempotency-Key` is that of an earlier call; else, if the client says so
        (`x-stainless-retry-count` above 0), or if the clients of an earlier call have left before
        they got the answer. Otherwise the same body asks for another sample.

        Args:
            call: What the body asks for.
            digest: Of the body.
            headers: Those of the HTTP request.

        Raises:
            CallError: If the key has too many calls.
        """
        same = self._calls.get(digest, [])
        given = headers.get("Idempotency-Key")
        if (earlier := _find_repeated(same, given, headers)) is not None:
            self.counts["repeated_calls"] += 1
            return earlier
        self._refuse_flood()
        task = asyncio.create_task(self._trajectory.complete(call))
        self._running.add(task)
        pending = PendingCall(task, given)
        task.add_done_callback(partial(self._end_call, digest, pending))
        self._calls.setdefault(digest, []).append(pending)
        return pending

    async def count_input_tokens(self, call: ChatCall) -> int:
        """Return the number of tokens of a call's history as a prompt.

        It counts as one of the calls of the key, and samples nothing.

        Raises:
            CallError: If the template cannot render the messages, or the key has too many calls.
        """
        self._refuse_flood()
        return await self._trajectory.count_input_tokens(call)

    def _refuse_flood(self) -> None:
        limit = self._settings.max_concurrent_calls
        if len(self._running) >= limit:
            raise self._refuse(f"{limit} calls of this key are running", "too_many_calls")
        if self._num_calls >= self._settings.max_calls:
            used = f"this request has used all its {self._settings.max_calls} calls"
            raise self._refuse(used, "budget_exceeded", 403)
        self._num_calls += 1

    def _end_call(
        self, digest: bytes, pending: PendingCall, task: asyncio.Task[tuple[ChatReply, Point]]
    ) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # a client that has left does not fetch it
        if pending.has_failed:  # its traceback has the call's messages
            self._calls[digest].remove(pending)

    async def report(self, body: bytes) -> None:
        """Store the reward that the agent posted.

        Raises:
            CallError: If the body is not `{"reward": number}`, with a finite number. Further fields
                are kept.
        """
        given = await self.read(partial(read_body, _Reward), body)
        self.reported_reward, self.reported = given.reward, given.model_dump()

    async def end(self) -> None:
        """Cancel the calls in progress, and write the sequences to the request."""
        running = list(self._running)
        for task in running:
            task.cancel()
        self.counts["cancelled_calls"] += len(running)
        if running:
            await wait_despite_cancellation(running)
        self._trajectory.finish()


def _find_repeated(
    same: list[PendingCall], idempotency_key: str | None, headers: Mapping[str, str]
) -> PendingCall | None:
    """Return the earlier call with this body that a call repeats, if any."""
    usable = [pending for pending in same if not pending.has_failed]
    if idempotency_key:
        equal = (one for one in usable if one.idempotency_key == idempotency_key)
        return next(equal, None)
    left = (one for one in usable if not (one.is_delivered or one.num_clients))
    retries = headers.get("x-stainless-retry-count", "0")
    if (abandoned := next(left, None)) or not (retries.isdigit() and int(retries) > 0):
        return abandoned
    waiting = (one for one in usable if not one.is_delivered)
    return next(waiting, usable[-1] if usable else None)
