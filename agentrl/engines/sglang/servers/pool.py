"""Several SGLang servers: who is well, and who gets which call.

A member is *in* while it is well and has the pool's weights; otherwise it is out, with a reason
that every error names. It goes out when its connection breaks, when its health check fails, when
one call is late and no other has been answered meanwhile, or when a weight update fails on it; its
running calls then end with `ServerLostError` at once, whether or not it is heard of again. It comes
back in when a look finds it well, with the weights of the pool's last update in the same process
that took them; a server that was started anew has to take part in the next one first.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import aiohttp

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.servers.client import (
    ServerLateError,
    ServerLostError,
    ServerState,
    SGLangServer,
)
from agentrl.engines.sglang.servers.handle import NOT_LOOKED_AT, Homes, Member, unfitness
from agentrl.errors import EngineError

FIRST_BACKOFF_S = 0.25
IDLE_S = 0.5
"""After so many seconds without a call the servers are asked for their state before the next."""
MAX_STRIKES = 4
"""So often the time between two looks at a server that is out is doubled."""


class ServerPool:
    """Places calls on servers, and watches them while its event loop runs.

    Args:
        settings: Addresses, and how long what may take.
        max_model_len: Most tokens of a sequence, which every member must allow.
        say: Told when a member goes out or comes in.
    """

    def __init__(
        self, settings: SGLangServerConfig, *, max_model_len: int, say: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.members: list[Member] = []
        self._max_model_len = max_model_len
        self._say = say
        self._version: int | None = None
        self._homes = Homes()
        self._session: aiohttp.ClientSession | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._num_holds = 0
        self._epoch = 0
        self._used_at = 0.0
        self._hearing = asyncio.Lock()
        self._is_open = asyncio.Event()
        self._is_closed = False

    def open(self) -> None:
        """Begin to watch the servers, on the running loop; nothing happens the second time.

        Raises:
            EngineError: where the pool was closed.
        """
        self._raise_if_closed()
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.health_timeout_s),
        )
        self.members = [
            Member(SGLangServer(address, self._session, self.settings))
            for address in self.settings.addresses
        ]
        if not self._num_holds:
            self._is_open.set()
        self._watches = [asyncio.create_task(self._watch(member)) for member in self.members]

    async def close(self) -> None:
        """End every call and watch no more; the servers themselves are left alone."""
        self._is_closed = True
        self._is_open.set()
        looks = [member.looking for member in self.members if member.looking is not None]
        for task in (*self._watches, *looks):
            task.cancel()
        for member in self.members:
            self.take_out(member, "the engine was closed")
        await asyncio.gather(*self._watches, *looks, return_exceptions=True)
        await asyncio.gather(*(member.server.close() for member in self.members))
        if self._session is not None:
            await self._session.close()

    # Placement.

    async def place(self, request_id: str, *, avoid: Sequence[Member] = ()) -> Member:
        """Choose a server: the one that knows the conversation, else the least loaded.

        Where none is in, all are looked at, a few times with growing waits between.

        Args:
            request_id: The conversation's.
            avoid: Who has failed at this call; taken only where nobody else is in.

        Raises:
            EngineError: where none is left, with what is wrong with each; or the pool was closed.
        """
        self.open()
        await self._be_up_to_date()
        for attempt in itertools.count():
            await self._is_open.wait()
            self._raise_if_closed()
            if member := self._homes.choose(request_id, self.members, avoid=avoid):
                return member
            if attempt > self.settings.max_retries:
                raise self._none_left()
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
            await self.look_at_all()
        raise AssertionError("counting has no end")

    async def _be_up_to_date(self) -> None:
        """After a pause, hear from everyone before the first call: somebody else may have updated
        the servers meanwhile, or started one anew.
        """
        async with self._hearing:
            is_first = any(member.trouble == NOT_LOOKED_AT for member in self.members)
            if self._num_holds or (not is_first and not self._was_idle()):
                return
            self._used_at = time.monotonic()
            if is_first:
                await self.look_at_all()
                return
            able = [member for member in self.members if member.is_in]
            found = await self._hear(able)
            for member in found:
                self._judge(member)

    def _was_idle(self) -> bool:
        is_running = any(member.calls for member in self.members)
        return not is_running and time.monotonic() - self._used_at > IDLE_S

    async def ask(self, member: Member, fields: JsonFields) -> JsonFields:
        """Have a member do a call.

        Raises:
            ServerFailedError: where another member may do; it went out if it is to blame.
            EngineError: where it refuses the call.
        """
        asked_at = time.monotonic()
        try:
            with self._running(member, fields["rid"]) as patience:
                async with patience:
                    answer = await member.server.generate(fields)
        except TimeoutError:
            raise ServerLostError(member.trouble or f"{member.name} ended the call") from None
        except ServerLostError as error:
            self._fail(member, error)
            raise
        except ServerLateError as error:
            if member.answered_at < asked_at:
                self._fail(member, error)
            raise
        member.answered_at, member.strikes = time.monotonic(), 0
        self._used_at = member.answered_at
        return answer

    @contextlib.contextmanager
    def _running(self, member: Member, rid: str) -> Iterator[asyncio.Timeout]:
        member.calls[rid] = asyncio.timeout(None)
        try:
            yield member.calls[rid]
        finally:
            del member.calls[rid]

    # Who is in.

    def take_out(self, member: Member, trouble: str) -> None:
        """Give a member no more calls, and end those that run on it."""
        was_in, member.trouble = member.is_in, trouble
        if was_in and not self._is_closed:
            is_left = any(other.is_in for other in self.members)
            rest = "; its requests go to the others" if is_left else ""
            self._say(f"{member.in_words(verb=' is out')}{rest}")
        member.end_calls()

    def _fail(self, member: Member, error: EngineError) -> None:
        member.strikes = min(member.strikes + 1, MAX_STRIKES)
        self.take_out(member, str(error))

    def in_words(self) -> str:
        """Each address and what is wrong with it."""
        return "; ".join(member.in_words() for member in self.members)

    async def look_at_all(self) -> None:
        """Look at every member, at once."""
        await asyncio.gather(*(self.look(member) for member in self.members))

    async def look(self, member: Member) -> None:
        """Look whether a member is well, or wait for the look that is under way."""
        if member.looking is None or member.looking.done():
            member.looking = asyncio.create_task(self._look(member))
        await asyncio.shield(member.looking)

    async def _look(self, member: Member) -> None:
        epoch = self._epoch
        if self._num_holds:
            return
        state = await _heard(member.look())
        if epoch != self._epoch or self._is_closed:
            return  # the pool was held meanwhile: what the server said is of before, or of a pause
        if isinstance(state, EngineError):
            self._fail(member, state)
        else:
            member.note(state)
            self._judge(member)

    def _judge(self, member: Member) -> None:
        """Take a member that is well in, or say what else is wrong with it."""
        assert member.state is not None, "it was heard before it is judged"
        if trouble := unfitness(
            member.state, member, self.members, max_model_len=self._max_model_len, run=self._version
        ):
            self.take_out(member, trouble)
            return
        if not member.is_in and member.trouble != NOT_LOOKED_AT:
            self._say(f"{member.name} is in again")
        member.trouble = None

    async def _watch(self, member: Member) -> None:
        """Look at a member again and again; the longer it is out, the rarer."""
        while True:
            doubled = 0 if member.is_in else member.strikes
            await asyncio.sleep(self.settings.health_interval_s * 2**doubled)
            await self.look(member)

    # Round an update, and in sleep.

    def hold(self) -> None:
        """Let new calls wait, and look at nobody, until `release` was called as often."""
        self._num_holds += 1
        self._epoch += 1
        self._is_open.clear()

    def release(self) -> None:
        """Undo one `hold`."""
        self._num_holds -= 1
        if not self._num_holds:
            self._is_open.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold for the length of a block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    async def reachable(self) -> list[Member]:
        """Find who can take part in an update: also those who are out, if they answer.

        Raises:
            EngineError: where nobody answers.
        """
        found = await self._hear(self.members)
        if not found:
            raise self._none_left()
        return found

    async def _hear(self, members: Sequence[Member]) -> list[Member]:
        """Ask members for their state; on whom that fails goes out. Gives the others."""
        answers = await asyncio.gather(*(_heard(member.server.read_state()) for member in members))
        found: list[Member] = []
        for member, state in zip(members, answers, strict=True):
            if isinstance(state, EngineError):
                self._fail(member, state)
            else:
                member.note(state)
                found.append(member)
        return found

    async def with_all(self, do: Callable[[Member], Awaitable[None]]) -> None:
        """Do something with everyone who is in; on whom it fails goes out.

        Raises:
            EngineError: where none is left.
        """
        await self._with_each([member for member in self.members if member.is_in], do)

    async def with_everyone(self, do: Callable[[Member], Awaitable[None]]) -> None:
        """Do something also with those who are out (see `with_all`)."""
        await self._with_each(self.members, do)

    async def _with_each(
        self, members: Sequence[Member], do: Callable[[Member], Awaitable[None]]
    ) -> None:
        await asyncio.gather(*(self._with(member, do) for member in members))
        if not any(member.is_in for member in self.members):
            raise self._none_left()

    async def _with(self, member: Member, do: Callable[[Member], Awaitable[None]]) -> None:
        try:
            await do(member)
        except EngineError as error:
            self._fail(member, error)

    def end_update(self, members: Sequence[Member], version: int) -> None:
        """Take these in, and nobody else: they have the new weights."""
        self._version = version
        for member in self.members:
            member.synced_birth = None
            if member not in members and member.is_in:
                self.take_out(member, "it took no part in the last update of the weights")
        for member in members:
            assert member.state is not None, "who takes part was asked for its state"
            member.state = replace(member.state, weight_version=f"{version}")
            member.synced_birth, member.broken_weights = member.state.birth, None
            self._judge(member)

    async def follow_update(self, version: int) -> None:
        """Take in who has the weights that another rank has just sent, and nobody else.

        Raises:
            EngineError: where nobody has them.
        """
        taken = [
            member
            for member in await self.reachable()
            if member.state is not None and member.state.weight_version == f"{version}"
        ]
        self.end_update(taken, version)
        if not taken:
            raise self._none_left()

    def break_weights(self, member: Member, why: str) -> None:
        """Keep calls from a member until an update has gone through on it."""
        member.synced_birth = None
        member.broken_weights = why
        self.take_out(member, why)

    def _none_left(self) -> EngineError:
        if any(member.state is not None for member in self.members):
            return EngineError("no SGLang server is left", servers=self.in_words())
        return EngineError(
            "no SGLang server answers",
            servers=self.in_words(),
            key="rollout.engine.sglang_server.addresses",
            expected="the addresses of running servers: `agentrl serve` starts some, and prints "
            "theirs",
        )

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine was closed")


async def _heard(asked: Awaitable[ServerState]) -> ServerState | EngineError:
    """What a server says, or what is wrong with it."""
    try:
        return await asked
    except EngineError as error:
        return error
