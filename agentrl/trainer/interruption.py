"""SIGINT (Ctrl-C) and SIGTERM in a run: cancel rollouts, finish everything else, save.

The first signal cancels running rollouts and releases their tools. Log-probabilities, an update or
a checkpoint are finished. Then the last completed step is saved, and the run ends with exit code
130, also if the signal arrives while the finished run writes its last files. A second Ctrl-C ends
the process immediately, except on a rank that waits for other ranks: Python handles a signal only
after the exchange. Schedulers wait about 30 s between SIGTERM and SIGKILL. If a step computes for
longer, only the last periodic checkpoint is left.

All ranks stop at the same point: they exchange the request to stop after their rollouts and around
the update. A rank that did not get the signal finishes its rollouts first.
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
"""A Ctrl-C within so many seconds of the first signal counts as the same one: a terminal sends it
to every rank, and torchrun forwards it."""
_EXITING = b"exiting immediately: nothing more was saved\n"


_listening: "list[Interruption]" = []
_stop_requested = threading.Event()


def request_stop() -> None:
    """Stop the run of this process as SIGTERM does, from any thread; also one that starts later.

    A rank on a Ray cluster does not run on the main thread and gets no signals.
    """
    _stop_requested.set()
    for interruption in list(_listening):
        interruption.request()


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and every rank knows it."""


class Interruption:
    """Handles SIGINT and SIGTERM of a run.

    Args:
        world: The ranks, which stop together.
        consequence: The effect on the work, for the message to the user.

    Example:
        >>> with interruption.listening(), asyncio.Runner() as runner:
        ...     requests = interruption.run(runner, manager.rollout(requests))
        ...     interruption.check()
    """

    def __init__(self, world: World, consequence: str = "completed work is saved") -> None:
        self._world = world
        self._stopping = f"stopping: tools are released, {consequence}; Ctrl-C exits immediately"
        self._asked_at: float | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Handle the signals during the block.

        A signal that the process ignores stays ignored: a shell starts background jobs so. Outside
        of the main thread Python cannot handle signals: `request_stop` takes their part.
        """
        if threading.current_thread() is not threading.main_thread():
            _listening.append(self)
            if _stop_requested.is_set():
                self.request()
            try:
                yield self
            finally:
                _listening.remove(self)
            return
        # getsignal returns None for a handler that was not set from Python: it cannot be restored.
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        ]
        before = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def run(self, runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that a signal may cancel.

        Raises:
            Interrupted: on this rank only; see `together`.
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
        """Let all ranks finish the block, then stop if any rank was asked to. A collective.

        Raises:
            Interrupted: on every rank.
            RankError: if another rank raised in the block.
        """
        with self._world.raise_on_all_ranks(), suppress(Interrupted):
            yield
        self.check()

    def check(self) -> None:
        """Stop if any rank was asked to. A collective.

        Raises:
            Interrupted: on every rank.
        """
        if self._world.max([float(self._asked_at is not None)])[0]:
            raise Interrupted

    def request(self) -> None:
        """Stop as SIGTERM does; may be called by any thread."""
        self._on_signal(signal.SIGTERM, None)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._world.is_main:
                self._announce()
        elif number == signal.SIGINT and now - self._asked_at > ECHO_S:
            if self._world.status.progress.is_live:
                _write_error(b"\n")  # below the bars
            exit_immediately()
        if self._running is not None:
            loop, task = self._running
            loop.call_soon_threadsafe(task.cancel)  # wakes a loop that sleeps

    def _announce(self) -> None:
        progress = self._world.status.progress
        if progress.is_live:  # what another writes would be drawn over
            progress.post(self._stopping)
        else:
            _write_error(f"{self._stopping}\n".encode())


def exit_immediately() -> NoReturn:
    """End this process and the processes of tools, without releasing anything."""
    _write_error(_EXITING)
    end_process(EXIT_CODE)


def _write_error(line: bytes) -> None:
    # In a signal handler, Python's streams may be in the middle of a line.
    with suppress(OSError):
        os.write(2, line)


class NestableRunner(asyncio.Runner):  # pyright: ignore[reportGeneralTypeIssues] # final in stubs only
    """Runs coroutines on its own event loop, also if the calling thread runs another one.

    In that case the coroutine runs on another thread, and the caller waits for it. The waiting
    thread still gets Ctrl-C, and its handler may cancel the coroutine.
    """

    def run(self, coro: Coroutine[Any, Any, T], *, context: Context | None = None) -> T:
        """Run a coroutine to its end."""
        return _outside_loop(lambda: super(NestableRunner, self).run(coro, context=context))

    def close(self) -> None:
        """Shut the loop down."""
        _outside_loop(super().close)


def _outside_loop(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-loop") as executor:
        return executor.submit(work).result()
