"""Make one check after the other; each has a row, and what one raises ends no other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from agentrl.errors import AgentRLError

T = TypeVar("T")


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """A run may go on; its user should know."""
    FAIL = "FAIL"
    """A run would not do what it is meant to."""
    SKIPPED = "skipped"
    """What it needs is not there, or it means nothing for this run."""


@dataclass(frozen=True, slots=True)
class Checked(Generic[T]):
    """What a check that came to its end found."""

    value: T
    """What later checks work with."""
    found: str
    """For the table: in words, with figures."""
    doubts: tuple[str, ...] = ()
    """What the user should know: a sentence each."""
    faults: tuple[str, ...] = ()
    """What is wrong, and what to do: a sentence each."""

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        if self.faults:
            return Verdict.FAIL
        return Verdict.WARN if self.doubts else Verdict.OK


class SkipCheckError(Exception):
    """A check that cannot be made, or says nothing here; its text says why."""


class Result(Generic[T]):
    """What a check leaves for those behind it.

    Args:
        name: Of the check.
        checked: None where it came to no end.
        skipped: Why it was not made; None: it was.
    """

    def __init__(
        self, name: str, checked: Checked[T] | None, skipped: SkipCheckError | None = None
    ) -> None:
        self._name = name
        self._checked = checked
        self._skipped = skipped

    @property
    def is_there(self) -> bool:
        """Whether there is a value."""
        return self._checked is not None

    def need(self) -> T:
        """Give the check's value to a check that cannot do without it.

        Raises:
            SkipCheckError: where there is none; it names the first that came to no end.
        """
        if self._checked is None:
            raise self._skipped or SkipCheckError(f"because of {self._name!r}")
        return self._checked.value


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    verdict: Verdict
    lines: tuple[str, ...]
    """What was found; then doubts and faults, a line each."""
    seconds: float


_COLOURS = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIPPED: "dim",
}


class Checkup:
    """Collects the rows, and shows the table as it grows.

    Args:
        console: Where it is shown.

    Example:
        >>> with Checkup(console) as checkup:
        ...     config = checkup.look("run file", read)
        ...     checkup.look("data", lambda: load(config.need()))
    """

    def __init__(self, console: Console) -> None:
        self.rows: list[Row] = []
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> "Checkup":
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def look(self, name: str, check: Callable[[], Checked[T]], *, advice: str = "") -> Result[T]:
        """Make one check.

        Args:
            name: Of its row.
            check: Finds something out. What it raises is a fault; a `SkipCheckError` is none.
            advice: What to do where an error does not say it itself.
        """
        begun, checked, skipped = time.monotonic(), None, None
        self._show(f"{name} ...")
        try:
            checked = check()
            verdict, lines = checked.verdict, _lines(checked)
        except SkipCheckError as why:
            verdict, lines, skipped = Verdict.SKIPPED, (str(why),), why
        except Exception as error:  # noqa: BLE001 - the boundary round one check
            verdict, lines = Verdict.FAIL, _told(error, advice)
        self.rows.append(Row(name, verdict, lines, time.monotonic() - begun))
        self._show()
        return Result(name, checked, skipped)

    def _show(self, running: str = "") -> None:
        self._live.update(make_table(self.rows, running), refresh=True)


def make_table(rows: Sequence[Row], running: str = "") -> Table:
    """Lay the rows out, and below them the check under way."""
    table = Table("check", "verdict", "found", "seconds", caption=running or None)
    table.columns[2].overflow = "fold"  # a path that is cut leads nowhere
    table.columns[3].justify = "right"
    for row in rows:
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        found = escape("\n".join(row.lines))
        table.add_row(row.name, verdict, found, f"{row.seconds:.1f}")
    return table


def _lines(checked: Checked[T]) -> tuple[str, ...]:
    told = [f"fault: {fault}" for fault in checked.faults]
    told += [f"note: {doubt}" for doubt in checked.doubts]
    return (*filter(None, [checked.found]), *told)


def _told(error: Exception, advice: str) -> tuple[str, ...]:
    """Word an error; ours say themselves what was expected."""
    if isinstance(error, AgentRLError):
        says_it = error.details.keys() & {"expected", "install", "choices"}
        return tuple(str(error).splitlines()) + (() if says_it or not advice else (advice,))
    told = f"{type(error).__name__}: {error}".splitlines()
    return (*told[:5], *filter(None, [advice]))
