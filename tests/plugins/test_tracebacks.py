"""The line of users' code that an exception came through, and the end of its traceback."""

import json
import sys
from collections.abc import Callable

import pytest

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.call import LONGEST_TRACEBACK, source_line, traceback_of


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
        work()
    return caught.value


def theirs() -> None:
    json.loads("{")


def leave() -> None:
    sys.exit(3)


def wrapped() -> None:
    try:
        leave()
    except SystemExit as error:
        raise RuntimeError("raised SystemExit") from error


def line_of(function: Callable[[], object], offset: int) -> str:
    return f"test_tracebacks.py:{function.__code__.co_firstlineno + offset}"


def test_the_last_line_of_users_code_is_named_and_not_the_librarys():
    assert source_line(raised(theirs)) == line_of(theirs, 1)
    assert source_line(raised(wrapped)) == line_of(leave, 1)
    assert source_line(ValueError("never raised")) is None


def test_lines_of_agentrl_are_not_users():
    error = raised(lambda: OpenAIFunctionToolSchema.model_validate({}).name)
    assert (source_line(error) or "").startswith("test_tracebacks.py")


class UnspeakableError(Exception):
    """Breaks when it is asked what it is."""

    def __str__(self) -> str:
        raise SystemError

    @property
    def __notes__(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise ValueError


def test_the_end_of_a_traceback_is_kept_however_broken_the_error():
    def fail() -> None:
        raise UnspeakableError

    def deep(level: int = 60) -> None:
        if not level:
            raise ValueError("x" * LONGEST_TRACEBACK)
        deep(level - 1)

    assert "in fail" in traceback_of(raised(fail))
    assert traceback_of(raised(deep)) == "x" * (LONGEST_TRACEBACK - 1) + "\n"
