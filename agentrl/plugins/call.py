"""Call code of users so that it cannot hang, block or crash its caller.

`call_bounded` is the one boundary around tools and simulated users: time-outs, cancellation and
every exception, even `SystemExit`, end there. Code that reads their answers is inside it too,
because converting or printing an object of the user runs the user's code. `contained` is the
boundary for code that awaits nothing. `in_thread` and `in_thread_loop` keep blocking code off the
event loop. Further down: where in users' code an exception was raised, and the end of plug-ins.
"""

import asyncio
import contextvars
import inspect
import logging
import re
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, cast

from agentrl.errors import PluginError, words_of

T = TypeVar("T")

TASK_PREFIX = "plugin:"
"""Prefix of the name of every task that runs users' code; the watchdog reads it."""

_NEEDS_MAIN_THREAD = re.compile(r"signal.* main thread|threaded environment.*signal", re.S)
MAX_GRACE_S = 1.0
GRACE_FRAC = 0.05
SET_UP_S = 600.0
"""Seconds of one set-up, if the plug-in has no shorter limit."""


class ExecutionMode(StrEnum):
    """Where the plain code of a plug-in runs."""

    INLINE = "none"
    """On the event loop (a plain `def` on a thread)."""
    THREAD = "thread"
    """On a thread of its own, which cannot be killed."""
    PROCESS = "process"
    """In a process, which is killed if it is late."""


class CallTimeoutError(TimeoutError):
    """The time-out of the call itself, in contrast to a `TimeoutError` that the plug-in raised."""


@dataclass(frozen=True, slots=True)
class _Attempt(Generic[T]):
    """How a call ended: a value, or what it raised."""

    value: T | None = None
    error: BaseException | None = None

    def unwrap(self) -> T:
        if self.error is None:
            return cast("T", self.value)
        if isinstance(self.error, Exception):
            raise self.error
        raise RuntimeError(f"raised {type(self.error).__name__}") from self.error


async def call_bounded(call: Callable[[], Awaitable[T]], *, timeout_s: float, name: str) -> T:
    """Await `call()` in a task of its own for at most `timeout_s` seconds.

    If the call is late, or its caller is cancelled, the call is cancelled and gets 5 % of its time,
    at most a second, to clean up. If it does not end then either, it is abandoned.

    If nothing blocks the event loop, everything ends within 110 % of `timeout_s`. A call cannot
    answer while another one blocks the loop. If the loop was blocked when the time was up, the
    time-out is postponed once: by the lateness of the loop, at most by `timeout_s`. A hanging call
    therefore ends after at most twice its `timeout_s`, plus the time for which others block the few
    turns of the loop that end it. Set-up inside the call has a limit of its own (`setting_up`).

    Args:
        call: Starts the work; called inside the task.
        timeout_s: Seconds.
        name: Whose code runs (`tool:calculator`), for the watchdog.

    Raises:
        CallTimeoutError: after `timeout_s`.
        Exception: what the call raised. A `KeyboardInterrupt`, `SystemExit` or stray
            `CancelledError` of its own becomes a `RuntimeError`.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_Attempt[T] | None] = loop.create_future()
    grace_s = min(MAX_GRACE_S, GRACE_FRAC * timeout_s)
    alarm = _Alarm(ended=ended, left_s=timeout_s, timeout_s=timeout_s, grace_s=grace_s)
    context = contextvars.copy_context()
    context.run(_running.set, alarm)
    task = loop.create_task(_contain(call, ended), name=TASK_PREFIX + name, context=context)
    alarm.start()
    try:
        attempt = await ended
    finally:
        alarm.stop()
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace_s)
    if attempt is None:
        raise CallTimeoutError(f"no answer within {timeout_s:g} s")
    return attempt.unwrap()


@contextmanager
def setting_up(limit_s: float = SET_UP_S) -> Generator[None]:
    """Stop the clock of the running bounded call: the set-up in this block has its own limit.

    For what a plug-in starts in its first call, or again after a failure: a session, a sandbox. May
    be used on a thread of the call, and without a bounded call. A set-up that takes longer than
    `limit_s` ends the call by a `CallTimeoutError` that says so.
    """
    alarm = _running.get()
    if alarm is not None:
        alarm.call(partial(alarm.stop, limit_s))
    try:
        yield
    finally:
        if alarm is not None:
            alarm.call(alarm.start)


def contained(function: Callable[[], T]) -> T:
    """Call users' code directly, for code that reads an object of theirs and takes no time.

    Raises:
        Exception: what it raised. A `SystemExit` and the like become a `RuntimeError`.
    """
    return _try(function).unwrap()


async def call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's method: an `async def` on the loop, a plain `def` on a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    value = await in_thread(lambda: method(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


def accepted_keywords(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered keywords that a user's function takes: all, with `**kwargs`.

    For optional keywords: code of users may be older, or shorter, than the interface.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C: it has no signature
        return dict(offered)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(offered)
    named = {name for name, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY}
    return {name: value for name, value in offered.items() if name in named}


def check_takes(
    function: Callable[..., Any],
    positional: Sequence[str],
    offered: Iterable[str] = (),
    *,
    is_partial: bool = False,
) -> None:
    """Check that a user's function takes the arguments that the library will pass.

    Args:
        function: A function or a bound method.
        positional: Names of the positional arguments, for the message.
        offered: Keywords, of which it gets those that it takes.
        is_partial: Whether a row may give it further arguments.

    Raises:
        PluginError: If it does not, with a signature that does.
    """
    try:
        named = accepted_keywords(function, dict.fromkeys(offered))
        signature = inspect.signature(function)
        (signature.bind_partial if is_partial else signature.bind)(*positional, **named)
    except ValueError:  # written in C: it has no signature
        return
    except TypeError as error:
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__qualname__", type(function).__qualname__)
        wanted = ", ".join([*positional, *offered, "**kwargs"])
        bound = "self, " if inspect.ismethod(function) else ""
        short = name.rpartition(".")[2]
        raise PluginError(
            f"{name} cannot be called: {error}", expected=f"def {short}({bound}{wanted})"
        ) from None


def with_event_loop(function: Callable[[], T]) -> T:
    """Call blocking code that runs coroutines on the loop of `asyncio.get_event_loop()`.

    Code that was written for the main thread does so; other threads have no loop by default.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return function()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on a daemon thread of its own.

    A thread cannot be killed. Cancelling abandons it. A daemon thread delays neither another call
    nor the end of the process; a thread of an executor would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Attempt[T]] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        attempt = _explained(context.run(_try, function))
        # If the loop has closed meanwhile, no task waits for the result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future, attempt)

    threading.Thread(target=run, name="agentrl-plugin", daemon=True).start()
    return (await future).unwrap()


def _explained(attempt: _Attempt[T]) -> _Attempt[T]:
    """Say how users' code that sets signals (an alarm) gets the main thread that it needs."""
    error = attempt.error
    if not isinstance(error, ValueError) or not _NEEDS_MAIN_THREAD.search(str(error)):
        return attempt
    explained = PluginError(
        f"it needs the main thread of a process, and it runs on another thread: {words_of(error)}",
        expected="a reward function: reward.manager: prime; a tool: an async def and isolation: "
        "process; other code: no signals (math_verify: parsing_timeout=None, timeout_seconds=None)",
    )
    explained.__cause__ = error
    return _Attempt(error=explained)


async def in_thread_loop(call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()` in an event loop of its own on a daemon thread.

    Cancelling also cancels the task in that loop. Code that blocks is abandoned.
    """
    remote = _RemoteTask()

    async def main() -> T:
        remote.begin()
        return await call()

    try:
        return await in_thread(lambda: asyncio.run(main()))
    except asyncio.CancelledError:
        remote.cancel()
        raise


class _RemoteTask:
    """A task of another thread's loop, which this thread can cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def begin(self) -> None:
        """Note the running task; called inside it."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        with self._lock:
            self._running = asyncio.get_running_loop(), task
            if self._cancelled:
                task.cancel()

    def cancel(self) -> None:
        """Cancel the task, now or as soon as it begins."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                loop, task = self._running
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)


async def _contain(
    call: Callable[[], Awaitable[T]], ended: "asyncio.Future[_Attempt[T] | None]"
) -> None:
    attempt: _Attempt[T]
    try:
        attempt = _Attempt(value=await call())
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        attempt = _Attempt(error=error)
    _settle(ended, attempt)


def _try(function: Callable[[], T]) -> _Attempt[T]:
    try:
        return _Attempt(value=function())
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        return _Attempt(error=error)


@dataclass(slots=True, kw_only=True)
class _Alarm:
    """The time-out of one call. It can be stopped, and continues when it is started as often."""

    ended: "asyncio.Future[Any]"
    left_s: float
    """Seconds that the call has left at `started_at`."""
    timeout_s: float
    grace_s: float
    """Lateness of the loop that does not count as blocked."""
    started_at: float = 0.0
    """The time of the loop's clock at which it was started last."""
    num_stops: int = 1
    """Stops without a start."""
    set_up_clock: asyncio.TimerHandle | None = None
    clock: asyncio.TimerHandle | None = None

    def call(self, change: Callable[[], None]) -> None:
        """Call a method of this alarm on its loop, from any thread."""
        with suppress(RuntimeError):  # the loop has closed
            self.ended.get_loop().call_soon_threadsafe(change)

    def start(self) -> None:
        """Continue, if every stop has ended."""
        self.num_stops -= 1
        loop = self.ended.get_loop()
        if self.set_up_clock is not None and not self.num_stops:
            self.set_up_clock.cancel()
        if not (self.num_stops or self.ended.done()):
            self.started_at = loop.time()
            self.clock = loop.call_at(self.started_at + self.left_s, self.ring)

    def stop(self, limit_s: float | None = None) -> None:
        """Keep the time that is left; for a set-up, at most for `limit_s`."""
        self.num_stops += 1
        loop = self.ended.get_loop()
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None
            self.left_s -= loop.time() - self.started_at
        if self.set_up_clock is not None and (limit_s is None or self.num_stops == 1):
            self.set_up_clock.cancel()
        if limit_s is not None and self.num_stops == 1:
            late = CallTimeoutError(f"the set-up did not end within {limit_s:g} s")
            ended: _Attempt[Any] = _Attempt(error=late)
            self.set_up_clock = loop.call_later(limit_s, _settle, self.ended, ended)

    def ring(self) -> None:
        """End the call; if the loop was blocked, postpone the end once by that time."""
        loop = self.ended.get_loop()
        late_s = loop.time() - self.started_at - self.left_s
        if late_s <= self.grace_s:
            _settle(self.ended, None)
        else:
            wait_s = min(late_s, self.timeout_s)
            self.clock = loop.call_later(wait_s, _settle, self.ended, None)


_running: contextvars.ContextVar[_Alarm | None] = contextvars.ContextVar("call", default=None)
"""The time-out of the innermost bounded call."""


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


LONGEST_TRACEBACK = 4000
"""Characters of a traceback that are kept, from its end."""

_NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of agentrl, of Python, and of installed packages."""


def source_line(error: BaseException) -> str | None:
    """Return the last line of users' code that an exception passed through; None if there is none.

    Example:
        >>> source_line(error)
        'my_tools.py:12'
    """
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in _frames(error)
        if not frame.f_code.co_filename.startswith(("<", *_NOT_THEIRS))
    ]
    return places[-1] if places else None


def describe_error(error: BaseException) -> str:
    """Describe an exception in a line, with the last line of users' code that it passed through.

    Example:
        >>> describe_error(error)
        'KeyError: price (at my_tools.py:12)'
    """
    return f"{words_of(error)}{at_source_line(error)}"


def at_source_line(error: BaseException) -> str:
    """Write `source_line` for the end of a message; empty if there is no such line."""
    place = source_line(error)
    return f" (at {place})" if place else ""


def traceback_of(error: BaseException) -> str:
    """Return the end of an exception's traceback. Never raises, even if the error is broken."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - `__str__` of users' errors may raise
        text = "".join(traceback.format_tb(error.__traceback__))
    return text[-LONGEST_TRACEBACK:]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Walk the frames, outermost first; then the frames of its cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield from traceback.walk_tb(one.__traceback__)
        one = one.__cause__


logger = logging.getLogger(__name__)

TIMEOUT_S = 15.0


class HasShutdown(Protocol):
    """A plug-in with resources that all requests of a run share."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def shutdown(self) -> Awaitable[None]:
        """Release what the requests share."""
        ...


async def shut_down(plugins: Iterable[HasShutdown], *, timeout_s: float = TIMEOUT_S) -> None:
    """Shut all plug-ins down at the same time; log what they raise."""
    await asyncio.gather(*(_shut_down(plugin, timeout_s) for plugin in plugins))


async def _shut_down(plugin: HasShutdown, timeout_s: float) -> None:
    try:
        await call_bounded(plugin.shutdown, timeout_s=timeout_s, name=plugin.name)
    except Exception as error:  # noqa: BLE001 - the boundary round users' code
        logger.warning("%s, shutdown: %s", plugin.name, words_of(error))


class PerLoop(Generic[T]):
    """Hold one object for each event loop.

    Locks, semaphores and connections belong to the loop that uses them first. An object of a loop
    that has closed is dropped when the next loop asks for its own.

    Args:
        make: Makes the object of the running loop, at the first `get` on that loop.

    Example:
        >>> async def first_and_second(locks):
        ...     return locks.get() is locks.get()
        >>> asyncio.run(first_and_second(PerLoop(asyncio.Lock)))
        True
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_loop: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """Return the running loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for other in list(self._by_loop):  # a copy: other threads add theirs meanwhile
                if other.is_closed():
                    self._by_loop.pop(other, None)
            self._by_loop[loop] = self._make()
        return self._by_loop[loop]

    def pop(self) -> T | None:
        """Remove and return the running loop's object; None if it has none."""
        return self._by_loop.pop(asyncio.get_running_loop(), None)
