"""Make one check after the other. Each has a row; an error of a check fails its row only."""

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
    """The run can start, but its user should read the row."""
    FAIL = "FAIL"
    """The run would not work as intended."""
    SKIPPED = "skipped"
    """An input of the check is missing, or the check has no meaning for this run."""


@dataclass(frozen=True, slots=True)
class Checked(Generic[T]):
    """What a completed check found."""

    value: T
    """The value that later checks use."""
    found: str
    """The finding for the table."""
    doubts: tuple[str, ...] = ()
    """Warnings for the user, a sentence each."""
    faults: tuple[str, ...] = ()
    """What is wrong and how to fix it, a sentence each."""

    @property
    def verdict(self) -> Verdict:
        """The worst finding."""
        if self.faults:
            return Verdict.FAIL
        return Verdict.WARN if self.doubts else Verdict.OK


class SkipCheckError(Exception):
    """A check cannot be made, or has no meaning here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The result of a check, for later checks."""

    name: str
    """The check's name."""
    checked: Checked[T] | None
    """None if the check failed with an error or was skipped."""
    skipped: SkipCheckError | None = None
    """Why the check was skipped; None if it was not."""

    def need(self) -> T:
        """Return the check's value.

        Raises:
            SkipCheckError: if there is none; names the first check that did not complete.
        """
        if self.checked is None:
            raise self.skipped or SkipCheckError(f"because of {self.name!r}")
        return self.checked.value


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    verdict: Verdict
    lines: tuple[str, ...]
    """The finding, then one line for each fault and doubt."""
    seconds: float


_COLORS = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIPPED: "dim",
}


class CheckRunner:
    """Makes checks, collects their rows, and updates the table after each.

    Args:
        console: Prints the table.

    Example:
        >>> with CheckRunner(console) as checks:
        ...     config = checks.run("run file", read)
        ...     checks.run("data", lambda: load(config.need()))
    """

    def __init__(self, console: Console) -> None:
        self.rows: list[Row] = []
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> "CheckRunner":
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def run(self, name: str, check: Callable[[], Checked[T]], *, advice: str = "") -> Result[T]:
        """Make one check.

        Args:
            name: The name of its row.
            check: The check. An error that it raises is a fault; `SkipCheckError` skips it.
            advice: What to do about an error that does not say what was expected.
        """
        started, checked, skipped = time.monotonic(), None, None
        self._show(f"{name} ...")
        try:
            checked = check()
            verdict, lines = checked.verdict, _lines(checked)
        except SkipCheckError as reason:
            verdict, lines, skipped = Verdict.SKIPPED, (str(reason),), reason
        except Exception as error:  # noqa: BLE001 - the error boundary of one check
            verdict, lines = Verdict.FAIL, _error_lines(error, advice)
        self.rows.append(Row(name, verdict, lines, time.monotonic() - started))
        self._show()
        return Result(name, checked, skipped)

    def _show(self, running: str = "") -> None:
        self._live.update(make_table(self.rows, running), refresh=True)


def make_table(rows: Sequence[Row], running: str = "") -> Table:
    """Make the table, with the running check as its caption."""
    table = Table("check", "verdict", "found", "seconds", caption=running or None)
    table.columns[2].overflow = "fold"  # never truncate a path
    table.columns[3].justify = "right"
    for row in rows:
        verdict = f"[{_COLORS[row.verdict]}]{row.verdict}[/]"
        found = escape("\n".join(row.lines))
        table.add_row(row.name, verdict, found, f"{row.seconds:.1f}")
    return table


def _lines(checked: Checked[T]) -> tuple[str, ...]:
    found = [checked.found] if checked.found else []
    faults = [f"fault: {fault}" for fault in checked.faults]
    return (*found, *faults, *(f"note: {doubt}" for doubt in checked.doubts))


def _error_lines(error: Exception, advice: str) -> tuple[str, ...]:
    """Describe an error; add the advice unless the error itself says what was expected."""
    if isinstance(error, AgentRLError):
        lines = str(error).splitlines()
        if error.details.keys() & {"expected", "install", "choices"}:
            advice = ""
    else:
        lines = f"{type(error).__name__}: {error}".splitlines()[:5]
    return (*lines, advice) if advice else tuple(lines)
