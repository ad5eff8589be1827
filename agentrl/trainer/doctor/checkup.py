"""Make one check after the other; each has a row, and what one raises ends no other."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from agentrl.errors import AgentRLError
from agentrl.trainer.doctor.records import Checked, Result, Row, SkipCheckError, Verdict

T = TypeVar("T")

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
