"""Grade code by tests, so that the code cannot say of itself that it passed.

What is expected never enters an interpreter in which the graded code runs. A program's output, and
what a function returns, are compared on the host. Asserts hold what is expected in their own text,
so they run in a second interpreter, and reach the code only through the host:

    host:       grade() ---- request, answer ----.---- request, answer ----.
                                                 |                         |
    sandbox:                    interpreter with the asserts    interpreter with the code
                                (guest_asserter)                (guest_callee)

Exit codes, printed tokens, an overridden `__eq__` or `print`, files and frames of the code's own
interpreter therefore decide nothing. Every test begins in fresh interpreters.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from agentrl.errors import DataError
from agentrl.plugins.call import PerLoop
from agentrl.plugins.environment import num_cores
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.grading.cases import AssertTest, CallTest, StdinTest, TestCase
from agentrl.sandbox.grading.compare import same_text, same_value
from agentrl.sandbox.grading.exchange import (
    MIN_OUTPUT_BYTES,
    Clock,
    TestFailure,
    check_end,
    guests,
    output_limit,
    read_value,
    show_value,
)
from agentrl.sandbox.grading.guest import encode
from agentrl.sandbox.grading.relay import relay_asserts

MAX_SHOWN = 300
"""Characters of an input, an expected and a given output that a report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """How long a grading may take."""

    test_timeout_s: float = 5.0
    """Seconds of one test."""
    total_timeout_s: float = 40.0
    """Seconds of all; tests that no time is left for count as failed."""
    max_tests: int = 32
    """Tests that are run: the first ones, where there are more."""
    max_timeouts: int = 2
    """After so many tests that did not end in time the rest count as failed."""
    stops_at_failure: bool = False
    """Whether the first failed test ends the grading: all or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """What came of one test."""

    __test__ = False  # what pytest would collect

    passed: bool
    given: str
    """The input, the call or the asserts; shortened, like the rest."""
    expected: str = ""
    """Empty for asserts, which say it themselves."""
    got: str = ""
    """The output, the value, or what went wrong."""
    is_late: bool = False
    """Whether it did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What came of all tests."""

    reports: tuple[TestReport, ...]
    """Of the tests that were run, in their order."""
    num_tests: int
    """Tests that counted, those included that were not run any more."""

    @property
    def num_passed(self) -> int:
        """Tests passed."""
        return sum(report.passed for report in self.reports)

    @property
    def passed_frac(self) -> float:
        """Share of the tests that passed."""
        return self.num_passed / self.num_tests

    @property
    def passed_all(self) -> bool:
        """Whether every test passed."""
        return self.num_passed == self.num_tests

    @property
    def first_failure(self) -> TestReport | None:
        """The first test that failed; None where none that was run did."""
        return next((report for report in self.reports if not report.passed), None)


async def grade(
    code: str, tests: Sequence[TestCase], sandbox: Sandbox, limits: GradingLimits | None = None
) -> Grade:
    """Run the tests one after another.

    Args:
        code: The program or module.
        tests: From `read_tests`; at least one.
        sandbox: Where everything runs.
        limits: None: the defaults.

    Raises:
        DataError: for tests that cannot grade anything.
        SandboxError: where the sandbox failed, which says nothing of the code.
    """
    limits = limits or GradingLimits()
    chosen = tests[: limits.max_tests]
    due = time.monotonic() + limits.total_timeout_s
    reports: list[TestReport] = []
    for test in chosen:
        timeout_s = min(limits.test_timeout_s, due - time.monotonic())
        is_spent = sum(report.is_late for report in reports) >= limits.max_timeouts
        has_failed = any(not report.passed for report in reports)
        if timeout_s <= 0 or is_spent or (limits.stops_at_failure and has_failed):
            break
        reports.append(await run_test(code, test, sandbox, timeout_s=timeout_s))
    return Grade(reports=tuple(reports), num_tests=len(chosen))


async def run_test(code: str, test: TestCase, sandbox: Sandbox, *, timeout_s: float) -> TestReport:
    """Run one test.

    Raises:
        DataError: for a test that cannot grade anything.
        SandboxError: where the sandbox failed.
    """
    given, expected = _describe(test)
    try:
        await _RUN[type(test)](code, test, sandbox, timeout_s)
    except TestFailure as failure:
        return TestReport(
            passed=False,
            given=given,
            expected=expected,
            got=_shown(str(failure)),
            is_late=failure.is_late,
        )
    return TestReport(passed=True, given=given, expected=expected, got=expected)


async def _run_stdin(code: str, test: StdinTest, sandbox: Sandbox, timeout_s: float) -> None:
    execution = await sandbox.run_program(
        ["python", "main.py"],
        files={"main.py": code},
        stdin=test.stdin,
        timeout_s=timeout_s,
        max_output_bytes=output_limit(test.expected),
    )
    check_end(execution)
    if not same_text(execution.stdout, test.expected):
        raise TestFailure(execution.stdout.strip() or "nothing")


async def _run_call(code: str, test: CallTest, sandbox: Sandbox, timeout_s: float) -> None:
    clock = Clock(timeout_s)
    max_output_bytes = output_limit(json.dumps(encode(test.expected, _refuse)))
    async with guests(sandbox, "guest_callee") as (guest,):
        await guest.ask(
            "load", code=code, timeout_s=clock.left_s, max_output_bytes=MIN_OUTPUT_BYTES
        )
        arguments = encode(list(test.arguments), _refuse)
        answer = await guest.ask(
            "function",
            name=test.function,
            args=arguments,
            timeout_s=clock.left_s,
            max_output_bytes=max_output_bytes,
        )
    value = read_value(answer)
    if not _is_expected(value, test.expected):
        raise TestFailure(show_value(value))


async def _run_asserts(code: str, test: AssertTest, sandbox: Sandbox, timeout_s: float) -> None:
    async with guests(sandbox, "guest_callee", "guest_asserter") as (callee, asserter):
        await relay_asserts(code, test, callee, asserter, Clock(timeout_s))


_RUN: dict[type[TestCase], Callable[[str, Any, Sandbox, float], Awaitable[None]]] = {
    StdinTest: _run_stdin,
    CallTest: _run_call,
    AssertTest: _run_asserts,
}


def _is_expected(value: Any, expected: Any) -> bool:
    """Compare; data sets write the expected value as it is, or as a list of it alone.

    A value whose comparison raises (a signaling NaN, a key of 5,000 digits) is another one.
    """
    try:
        if same_value(value, expected):
            return True
        return isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])  # pyright: ignore
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return False


def _refuse(value: Any) -> Any:
    raise DataError(f"a value of a test is {value!r:.80}", expected="data, as JSON has it")


def _describe(test: TestCase) -> tuple[str, str]:
    """Show what a test gives, and what it expects; asserts say the latter themselves."""
    match test:
        case StdinTest():
            return _shown(test.stdin), _shown(test.expected)
        case CallTest():
            arguments = ", ".join(map(show_value, test.arguments))
            return _shown(f"{test.function}({arguments})"), _shown(show_value(test.expected))
        case AssertTest(source, None):
            return _shown(source), ""
        case AssertTest(_, entry_point):
            return f"check({entry_point})", ""


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


_LANGUAGE = re.compile(r"[ \t]*```[ \t]*([\w+#-]*)")
_PYTHON = {"", "py", "python", "python3", "Python"}


def last_code_block(text: str) -> str | None:
    r"""Give the last fenced block of Python, or of no language; None where there is none.

    A block that was cut before its closing fence counts.

    Example:
        >>> last_code_block("First\n```python\nx = 1\n```\nthen")
        'x = 1'
    """
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip(" \t").startswith("```")]
    # Every second fence closes; the last one may be missing.
    blocks = list(zip_longest(fences[::2], fences[1::2], fillvalue=len(lines)))
    for first, last in reversed(blocks):
        opening = _LANGUAGE.match(lines[first])
        if opening is not None and opening[1] in _PYTHON and first + 1 < len(lines):
            return "\n".join(lines[first + 1 : last])
    return None


def without_fence(code: str) -> str:
    r"""Take the fence off code that a model wrote into one, whatever its language.

    Example:
        >>> without_fence("```bash\nls\n```")
        'ls'
    """
    stripped = code.strip()
    head, end, body = stripped.partition("\n")
    is_fenced = end and head.startswith("```") and "`" not in head[3:] and body.endswith("```")
    return body[:-3].rstrip(" \t").removesuffix("\n") if is_fenced else code


_ROOMS = PerLoop(lambda: asyncio.Semaphore(num_cores()))


def grading_semaphore() -> asyncio.Semaphore:
    """Give the event loop's one room for gradings; scorers and reviewers share it.

    Tests have a time-out of wall clock. Where more of them compute than there are cores, they take
    each other's time, and right code comes out as late. So enter it before a clock starts.

    Example:
        >>> async with grading_semaphore():
        ...     found = await grade(code, tests, sandbox)
    """
    return _ROOMS.get()
