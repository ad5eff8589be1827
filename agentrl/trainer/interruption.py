"""Ctrl-C and SIGTERM in a run: cut short what loses nothing by it, finish the rest.

The first signal cancels the rollouts under way, whose tools are released; log-probabilities, an
update or a checkpoint under way are finished. Then the last finished step is saved, and the run
ends with exit code 130; so it does where the signal comes while the finished run writes its end.
Another Ctrl-C leaves at once, but for a rank that waits for the others: Python hears a signal only
when the exchange is over. Schedulers allow some 30 s between SIGTERM and SIGKILL; where a step
computes for longer, the last regular checkpoint stands.

On several ranks all of them stop at the same place: each waits for the others' word behind its
rollouts and around its update. Whoever was not signalled finishes its rollouts first.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from agentrl.trainer.process_exit import EXIT_CODE, end_process
from agentrl.workers.distributed import World

T = TypeVar("T")

ECHO_S = 1.0
"""A Ctrl-C within so many seconds of the first signal is the same one: a terminal sends it to every
rank, and torchrun passes it on."""
SAVED = "what is finished is saved"
_LEAVING = b"left at once: nothing more was saved\n"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and every rank knows it."""


class Interruption:
    """What a run knows of Ctrl-C and SIGTERM.

    Args:
        world: The ranks, which stop together.
        fate: What becomes of the work, in words, for whoever has stopped it.

    Example:
        >>> with interruption.listening(), asyncio.Runner() as runner:
        ...     requests = interruption.run(runner, manager.rollout(requests))
        ...     interruption.check()
    """

    def __init__(self, world: World, fate: str = SAVED) -> None:
        self._world = world
        self._stopping = f"stopping: tools are released, {fate}; Ctrl-C leaves at once\n".encode()
        self._asked_at: float | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Take the signals over during the block.

        What the process ignores stays ignored: a shell starts its background jobs so. Outside the
        main thread Python takes no signals, and the block changes nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if _is_heard(n)]
        before = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def run(self, runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
        """Run what a signal may cut short: it is cancelled, and waited for.

        Raises:
            Interrupted: on this rank alone; see `together`.
        """

        async def main() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._running = asyncio.get_running_loop(), task
            if self._asked_at is not None:
                task.cancel()
            return await work

        try:
            return runner.run(main())
        except asyncio.CancelledError:
            if self._asked_at is None:
                raise
            raise Interrupted from None
        finally:
            self._running = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks leave the block, and then stop where one of them was asked to.

        A collective, behind the block.

        Raises:
            Interrupted: on every rank.
            RankError: where another rank raised in the block.
        """
        with self._world.raise_on_all_ranks(), suppress(Interrupted):
            yield
        self.check()

    def check(self) -> None:
        """Stop where any rank was asked to. A collective.

        Raises:
            Interrupted: on every rank.
        """
        if self._world.max([float(self._asked_at is not None)])[0]:
            raise Interrupted

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._world.is_main:
                _tell(self._stopping)
        elif number == signal.SIGINT and now - self._asked_at > ECHO_S:
            leave_at_once()
        if self._running is not None:
            loop, task = self._running
            # From another thread's way in: it wakes a loop that sleeps.
            loop.call_soon_threadsafe(task.cancel)


def leave_at_once() -> NoReturn:
    """End this process and the tools' processes, releasing nothing."""
    _tell(_LEAVING)
    end_process(EXIT_CODE)


def _is_heard(number: int) -> bool:
    # None: a handler that was not set from Python, which could not be put back.
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _tell(line: bytes) -> None:
    # In a signal handler: the streams of Python may be in the middle of a line.
    with suppress(OSError):
        os.write(2, line)


class NestableRunner(asyncio.Runner):  # pyright: ignore[reportGeneralTypeIssues] # final in stubs only
    """Runs coroutines on a loop of its own, whatever runs in the calling thread.

    If the calling thread runs an event loop, the coroutine runs on another thread, and the caller
    waits for it. Ctrl-C is heard by the waiting thread: a handler may cancel the coroutine.
    """

    def run(self, coro: Coroutine[Any, Any, T], *, context: Context | None = None) -> T:
        """Run a coroutine to its end."""
        return _aside(lambda: super(NestableRunner, self).run(coro, context=context))

    def close(self) -> None:
        """Shut the loop down."""
        _aside(super().close)


def _aside(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-loop") as executor:
        return executor.submit(work).result()
