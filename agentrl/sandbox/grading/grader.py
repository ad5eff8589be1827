"""Grade code by tests, in such a way that the code cannot claim to have passed (docs/grading.md).

Expected values never enter an interpreter in which the graded code runs. The output of a program
and the return value of a function are compared on the host. Asserts contain the expected values in
their own text, so they run in a second interpreter and reach the code only through the host:

    host:       grade() ---- request, answer ----.---- request, answer ----.
                                                 |                         |
    sandbox:                    interpreter with the asserts    interpreter with the code
                                (guest_asserter)                (guest_callee)

Exit codes, printed marks, an overridden `__eq__` or `print`, files and frames of the code's own
interpreter therefore decide nothing. Every test starts in fresh interpreters.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
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
    TestFailure,
    check_end,
    guests,
    output_limit,
    read_value,
    relay_asserts,
    show_value,
)
from agentrl.sandbox.grading.guest import encode

MAX_SHOWN = 300
"""Characters that a report shows of an input, an expected output and the actual output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """Limits of one grading."""

    test_timeout_s: float = 5.0
    """Seconds for one test."""
    total_timeout_s: float = 40.0
    """Seconds for all tests. Tests that do not start in time count as failed."""
    max_tests: int = 32
    """Number of tests to run: the first ones, if there are more."""
    max_timeouts: int = 2
    """After this many tests that did not end in time, the rest count as failed."""
    stops_at_failure: bool = False
    """Whether the first failed test ends the grading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """The result of one test."""

    __test__ = False  # pytest would collect it

    passed: bool
    given: str
    """The input, the call or the asserts, shortened like the other texts."""
    expected: str = ""
    """The expected output; empty for asserts, which contain it."""
    got: str = ""
    """The output, the value, or the error."""
    is_late: bool = False
    """Whether it did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The result of all tests."""

    reports: tuple[TestReport, ...]
    """Reports of the tests that were run, in order."""
    num_tests: int
    """Number of tests that count, including those that were not run."""

    @property
    def num_passed(self) -> int:
        """Number of tests that passed."""
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
        """The first test that failed; None if every test that was run passed."""
        return next((report for report in self.reports if not report.passed), None)


async def grade(
    code: str, tests: Sequence[TestCase], sandbox: Sandbox, limits: GradingLimits | None = None
) -> Grade:
    """Run the tests one after another.

    Args:
        code: The program or module.
        tests: At least one test, from `read_tests`.
        sandbox: Runs the code and the tests.
        limits: None for the defaults.

    Raises:
        DataError: If a test cannot grade anything.
        SandboxError: If the sandbox failed. This says nothing about the code.
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
        DataError: If the test cannot grade anything.
        SandboxError: If the sandbox failed.
    """
    given, expected = _describe(test)
    try:
        match test:
            case StdinTest():
                await _run_stdin(code, test, sandbox, timeout_s)
            case CallTest():
                await _run_call(code, test, sandbox, timeout_s)
            case AssertTest():
                await relay_asserts(code, test, sandbox, timeout_s)
    except TestFailure as failure:
        got, is_late = _shown(str(failure)), failure.is_late
        return TestReport(passed=False, given=given, expected=expected, got=got, is_late=is_late)
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
    max_output_bytes = output_limit(json.dumps(encode(test.expected, _refuse)))
    arguments = encode(list(test.arguments), _refuse)
    async with guests(sandbox, timeout_s, "guest_callee") as (guest,):
        await guest.ask("load", max_output_bytes=MIN_OUTPUT_BYTES, code=code)
        answer = await guest.ask(
            "function", max_output_bytes=max_output_bytes, name=test.function, args=arguments
        )
    value = read_value(answer)
    if not _is_expected(value, test.expected):
        raise TestFailure(show_value(value))


def _is_expected(value: Any, expected: Any) -> bool:
    """Compare with the expected value, which some data sets write as a list of one.

    If the comparison raises (a signaling NaN, a key of 5,000 digits), the value is wrong.
    """
    try:
        if same_value(value, expected):
            return True
        return isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])  # pyright: ignore
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return False


def _refuse(value: Any) -> Any:
    raise DataError(f"a value of a test is {value!r:.80}", expected="data that JSON can hold")


def _describe(test: TestCase) -> tuple[str, str]:
    """Describe the input of a test and its expected output, which is empty for asserts."""
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
    r"""Return the last fenced block of Python or of no language; None if there is none.

    A block without its closing fence counts.

    Example:
        >>> last_code_block("First\n```python\nx = 1\n```\nthen")
        'x = 1'
    """
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip(" \t").startswith("```")]
    # Every second fence closes a block. The last one may be missing.
    blocks = list(zip_longest(fences[::2], fences[1::2], fillvalue=len(lines)))
    for first, last in reversed(blocks):
        opening = _LANGUAGE.match(lines[first])
        if opening is not None and opening[1] in _PYTHON and first + 1 < len(lines):
            return "\n".join(lines[first + 1 : last])
    return None


def without_fence(code: str) -> str:
    r"""Remove the fence around code that a model wrote, in any language.

    Example:
        >>> without_fence("```bash\nls\n```")
        'ls'
    """
    stripped = code.strip()
    head, end, body = stripped.partition("\n")
    is_fenced = end and head.startswith("```") and "`" not in head[3:] and body.endswith("```")
    return body[:-3].rstrip(" \t").removesuffix("\n") if is_fenced else code


_SEMAPHORES = PerLoop(lambda: asyncio.Semaphore(num_cores()))


def grading_semaphore() -> asyncio.Semaphore:
    """Return the semaphore that limits the event loop's gradings to the number of cores.

    Scorers and reviewers share it. The time limit of a test is wall clock time: if more tests
    compute than there are cores, they slow each other down and correct code is late. So enter it
    before a clock starts.

    Example:
        >>> async with grading_semaphore():
        ...     found = await grade(code, tests, sandbox)
    """
    return _SEMAPHORES.get()
