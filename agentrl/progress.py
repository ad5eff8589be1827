"""Show what long work does: one live display in a terminal, plain lines elsewhere.

    work, in any layer     -> Progress.bar, Advance     counts what is done; it draws nothing
    ProgressDisplay        -> a thread of its own       reads the counts and draws them

`Advance` only adds numbers. The display reads them a few times a second, or once a minute without a
terminal, so its cost does not depend on how often work advances.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ProgressMode = Literal["auto", "live", "plain", "off"]

DRAW_S = 0.5
"""Seconds between two drawings of the live display."""
PLAIN_S = 60.0
"""Seconds that work takes before the first plain line, and between two of its lines."""
_PLAIN_CHECKS = 4
_BAR_WIDTH = 24
_FIGURES_WIDTH = 60
"""Least width of names, counts and figures next to a bar; in a narrower terminal it is left out."""


class Advance(Protocol):
    """Counts what is done of one task."""

    def __call__(self, count: int = 1, *, failed: int = 0, tokens: int = 0) -> None:
        """Add to the counts; may be called from any thread."""
        ...


class Progress(Protocol):
    """Displays tasks. Work in lower layers knows this and no display."""

    @property
    def is_live(self) -> bool:
        """Whether a live display is on the terminal now."""
        ...

    def bar(
        self, name: str, total: int | None, *, done: int = 0, with_stage: bool = False
    ) -> AbstractContextManager[Advance]:
        """Show a task during a `with` block.

        Args:
            name: What is done, in a few words.
            total: How much there is to do; None: unknown.
            done: How much was done earlier; it does not count for the rate.
            with_stage: Whether the stage of the run is shown below.
        """
        ...

    def post(self, line: str) -> None:
        """Print a line above a live display; a signal handler may call this."""
        ...


@dataclass(slots=True)
class _Task:
    """The counts of one task. Only `advance` changes them."""

    name: str
    total: int | None
    earlier: int
    with_stage: bool
    started: float
    done: int = 0
    failed: int = 0
    tokens: int = 0
    printed: float = 0.0
    """When a plain line was printed last."""

    def advance(self, count: int = 1, *, failed: int = 0, tokens: int = 0) -> None:
        self.done += count
        self.failed += failed
        self.tokens += tokens

    @property
    def is_complete(self) -> bool:
        return self.total is None or self.earlier + self.done >= self.total

    def counts(self) -> str:
        if self.total is None and not self.done:
            return ""
        done = f"{self.earlier + self.done:,}"
        return done if self.total is None else f"{done}/{self.total:,}"

    def figures(self, now: float) -> str:
        """Write failures, rate, time so far and time left."""
        seconds = max(now - self.started, 1e-9)
        parts = [f"{self.failed:,} failed"] if self.failed else []
        if self.tokens:
            parts.append(f"{self.tokens / seconds:,.0f} tokens/s")
        elif self.done:
            rate = self.done / seconds
            parts.append(f"{rate:,.1f}/s" if rate >= 1 else f"{1 / rate:,.1f} s each")
        parts.append(format_duration(seconds))
        if self.total is not None and self.done:
            left = max(0, self.total - self.earlier - self.done)
            parts.append(f"{format_duration(seconds / self.done * left)} left")
        return ", ".join(parts)


class NoProgress:
    """Displays nothing."""

    is_live = False

    @contextmanager
    def bar(
        self, name: str, total: int | None, *, done: int = 0, with_stage: bool = False
    ) -> Iterator[Advance]:
        """Count nothing."""
        yield _ignore

    def post(self, line: str) -> None:
        """Do nothing: there is no display above which the line would be printed."""


NO_PROGRESS = NoProgress()


def _ignore(count: int = 1, *, failed: int = 0, tokens: int = 0) -> None:
    pass


class ProgressDisplay:
    """Displays nested tasks while at least one is open, and removes them from the terminal then.

    What is printed meanwhile, also by other code to standard output and error, appears above the
    live display.

    Args:
        console: The console to draw on.
        mode: `auto`: live in a terminal, else plain lines. `live`: live in any case. `plain`: one
            line a minute. `off`: nothing.
        stage: Returns what the run does now.
    """

    def __init__(
        self, console: Console, mode: ProgressMode = "auto", stage: Callable[[], str] = lambda: ""
    ) -> None:
        if mode == "auto":
            is_terminal = console.is_terminal and not console.is_dumb_terminal
            mode = "live" if is_terminal and console.file.isatty() else "plain"
        self.stage = stage
        self._console = console
        self._mode: ProgressMode = mode
        self._tasks: list[_Task] = []
        self._posted: deque[str] = deque()
        self._stage = _Task("", None, 0, with_stage=False, started=0.0)
        self._live: Live | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_live(self) -> bool:
        """Whether the display is on the terminal now."""
        return self._live is not None

    @contextmanager
    def bar(
        self, name: str, total: int | None, *, done: int = 0, with_stage: bool = False
    ) -> Iterator[Advance]:
        """Show a task during a `with` block (see `Progress`)."""
        if self._mode == "off":
            yield _ignore
            return
        task = _Task(name, total, done, with_stage, started=time.monotonic())
        self._tasks.append(task)
        try:
            if len(self._tasks) == 1:
                self._start()
            yield task.advance
        finally:
            self._tasks.remove(task)
            if not self._tasks:
                self._stop()

    def post(self, line: str) -> None:
        """Print a line at the next drawing."""
        self._posted.append(line)

    def _start(self) -> None:
        if self._mode == "live":
            is_ours = self._console.file is sys.stdout
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=is_ours,
                redirect_stderr=is_ours and sys.stderr.isatty(),
            )
            self._live.start()
            self._console.show_cursor(True)  # a killed process would leave it hidden
            _move_log_handlers()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._draw, args=(self._ended,), name="agentrl-progress", daemon=True
        )
        self._thread.start()

    def _stop(self) -> None:
        self._ended.set()
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                thread.join()
        finally:
            live, self._live = self._live, None
            if live is not None:
                live.stop()
                _restore_log_handlers()
            self._print_posted()

    def _draw(self, ended: threading.Event) -> None:
        """Draw until the last task has ended. Runs on the display's thread."""
        live = self._live
        while not ended.wait(DRAW_S if live else PLAIN_S / _PLAIN_CHECKS):
            self._print_posted()
            if live is not None:
                live.refresh()
            else:
                self._print_plain()

    def _print_posted(self) -> None:
        while self._posted:
            self._console.print(self._posted.popleft(), markup=False, soft_wrap=True)

    def _follow_stage(self, now: float) -> _Task:
        if (name := self.stage()) != self._stage.name:
            self._stage = _Task(name, None, 0, with_stage=False, started=now)
        return self._stage

    def _shown(self, now: float) -> list[_Task]:
        """Return the open tasks, and the stage if it is not one of them."""
        tasks, stage = list(self._tasks), self._follow_stage(now)
        last = tasks[-1] if tasks else stage
        if last.with_stage or (last.is_complete and stage.started > last.started):
            tasks += [stage] if stage.name else []
        return tasks

    def _render(self) -> RenderableType:
        now = time.monotonic()
        shown = self._shown(now)
        table = Table.grid(padding=(0, 1))
        has_bars = self._console.width >= _BAR_WIDTH + _FIGURES_WIDTH
        names = max((len(task.name) for task in shown), default=0)
        for width in (names, 0, _BAR_WIDTH if has_bars else 0, 0):
            table.add_column(no_wrap=True, overflow="ellipsis", min_width=width)
        for task in shown:
            bar: RenderableType = ""
            if has_bars and task.total is not None:
                bar = ProgressBar(task.total, task.earlier + task.done, width=_BAR_WIDTH)
            table.add_row(Text(task.name), task.counts(), bar, Text(task.figures(now)))
        return table

    def _print_plain(self) -> None:
        """Print a line for the innermost task if it takes long."""
        now = time.monotonic()
        shown = self._shown(now)
        if not shown or shown[-1].with_stage:
            return
        task = shown[-1]
        if now - max(task.started, task.printed) >= PLAIN_S:
            task.printed = now
            line = f"{task.name}: " + ", ".join(filter(None, [task.counts(), task.figures(now)]))
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Write a duration in its two largest units.

    Example:
        >>> [format_duration(s) for s in (9, 61, 3700, 90000)]
        ['9s', '1m01s', '1h01m', '1d01h']
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


# Streams that a live display redirects.

_moved: "list[logging.StreamHandler[Any]]" = []
"""Handlers of logs that write to a redirected stream."""


def _move_log_handlers() -> None:
    """Let handlers that were made before the redirection print above the display."""
    proxies = [proxy for proxy in (sys.stdout, sys.stderr) if isinstance(proxy, FileProxy)]
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for one in loggers if proxies else ():
        for handler in one.handlers if isinstance(one, logging.Logger) else ():
            for proxy in proxies if isinstance(handler, logging.StreamHandler) else ():
                writer = cast("logging.StreamHandler[Any]", handler)
                if writer.stream is proxy.rich_proxied_file:
                    writer.setStream(proxy)
                    _moved.append(writer)


def _restore_log_handlers() -> None:
    while _moved:
        handler = _moved.pop()
        if isinstance(handler.stream, FileProxy):
            handler.setStream(handler.stream.rich_proxied_file)


def _leave_display() -> None:
    """Write to the real streams in a forked process: the lock of the display may be held there."""
    if isinstance(sys.stdout, FileProxy):
        sys.stdout = cast("Any", sys.stdout.rich_proxied_file)
    if isinstance(sys.stderr, FileProxy):
        sys.stderr = cast("Any", sys.stderr.rich_proxied_file)
    _restore_log_handlers()


os.register_at_fork(after_in_child=_leave_display)
