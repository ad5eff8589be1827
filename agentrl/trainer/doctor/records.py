"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

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
