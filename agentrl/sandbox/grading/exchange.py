"""Exchange requests and answers with the guests of a test. An answer may be forged: check it.

`relay_asserts` carries the requests of the asserts to the interpreter with the code and back.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.errors import DataError
from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.grading.cases import AssertTest
from agentrl.sandbox.grading.guest import decode

_ENDS = {
    ExecutionEnd.TIMEOUT: "it did not end in time",
    ExecutionEnd.CPU: "it used up its processor time",
    ExecutionEnd.MEMORY: "it ran out of memory",
    ExecutionEnd.KILLED: "the interpreter was ended",
}
Role = Literal["guest_callee", "guest_asserter"]
_MODULES: dict[Role, tuple[str, ...]] = {
    "guest_callee": ("guest", "guest_callee"),
    "guest_asserter": ("guest", "guest_tests", "guest_asserter"),
}
MIN_OUTPUT_BYTES = 64 * 1024
"""Bytes to read of a program or function, even if the expected output is short."""
MAX_OUTPUT_BYTES = 32 * 1024**2
"""Largest limit on what is read. The expected output may have an eighth of it."""
MAX_REQUESTS = 10_000
"""Requests to the code (calls, attributes, ...) that the asserts of one test may make."""
MAX_ANSWER_BYTES = 2 * 1024**2
"""JSON of one value that asserts fetch from the code. The code fails if a value has more."""
MAX_REQUEST_BYTES = 8 * 1024**2
"""JSON of the arguments of one call. A test with more is an error of the row."""


class TestFailure(Exception):  # noqa: N818 - a verdict, not an error
    """A test that the code did not pass. Its text explains the failure to the author of the code.

    Args:
        text: The error, or the output that was wrong.
        is_late: Whether the test did not end in time.
    """

    __test__ = False  # pytest would collect it

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


class OutputCutError(TestFailure):
    """There is no answer, because more was printed than is read."""


class GuestRaisedError(TestFailure):
    """The requested operation raised."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = {"error": str(answer["error"]), "message": str(answer.get("message", ""))}
        message = f"{self.answer['error']}: {self.answer['message']}".rstrip(": ")
        super().__init__(f"it raised {message}")


class Opaque:
    """Represents on the host an object of the code that is no data. It equals nothing."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


@dataclass
class TimeLeft:
    """The time that the guests of one test have left."""

    seconds: float


class Guest:
    """An interpreter of the sandbox with the guest's modules in it.

    Args:
        session: A new session; the caller closes it.
        role: The guest's role.
        time_left: Seconds that the guests of the test may still run, without their start.
    """

    def __init__(self, session: Session, role: Role, time_left: TimeLeft) -> None:
        self._session, self._time_left = session, time_left
        self._prelude = _prelude(role)

    async def ask(self, what: str, *, max_output_bytes: int, **request: Any) -> Any:
        """Request an operation and return its answer as JSON values.

        Raises:
            GuestRaisedError: If the operation raised.
            OutputCutError: If it printed more than `max_output_bytes`.
            TestFailure: If there is no answer, or no time is left.
            SandboxError: If the sandbox failed.
        """
        left_s = self._time_left.seconds
        if left_s <= 0:
            raise TestFailure(_ENDS[ExecutionEnd.TIMEOUT], is_late=True)
        mark = f"answer-{secrets.token_hex(8)}:"
        encoded = json.dumps({"ask": what, **request})
        source = f"{self._prelude}_agentrl_serve({mark!r}, {encoded!r})"
        begun = time.monotonic()
        execution = await self._session.run(
            source, timeout_s=left_s, max_output_bytes=max_output_bytes
        )
        used_s = time.monotonic() - begun
        if self._prelude:  # the first request waits for the start of the interpreter
            used_s = min(max(execution.seconds, 0.0), used_s)
        self._time_left.seconds -= used_s
        self._prelude = ""
        answer = _find_answer(execution, mark)
        if "error" in answer:
            raise GuestRaisedError(answer)
        return answer.get("value")


@asynccontextmanager
async def guests(
    sandbox: Sandbox, timeout_s: float, *roles: Role
) -> AsyncGenerator[tuple[Guest, ...]]:
    """Open fresh interpreters with a guest in each, and close them after the block."""
    time_left = TimeLeft(timeout_s)
    async with AsyncExitStack() as stack:
        opened: list[Guest] = []
        for role in roles:
            session = await sandbox.open_python()
            stack.push_async_callback(session.close)
            opened.append(Guest(session, role, time_left))
        yield tuple(opened)


async def relay_asserts(code: str, test: AssertTest, sandbox: Sandbox, timeout_s: float) -> None:
    """Run the asserts in one interpreter against the code in another.

    Raises:
        TestFailure: If the code does not pass.
        DataError: If the test cannot grade anything.
        SandboxError: If the sandbox failed.
    """
    async with guests(sandbox, timeout_s, "guest_callee", "guest_asserter") as (callee, asserter):
        await callee.ask("load", max_output_bytes=MAX_ANSWER_BYTES, code=code)
        begin = {"source": test.source, "entry_point": test.entry_point}
        request = await _ask_asserter(asserter, "begin", **begin)
        for _ in range(MAX_REQUESTS):
            if "verdict" in request:
                return _judge(request, test)
            what = str(request.pop("ask"))
            try:
                value = await callee.ask(what, max_output_bytes=MAX_ANSWER_BYTES, **request)
                answer = {"value": value}
            except GuestRaisedError as error:  # the asserts may expect it
                answer = error.answer
            request = await _ask_asserter(asserter, "resume", answer=answer)
    raise TestFailure(f"the asserts made more than {MAX_REQUESTS} requests")


async def _ask_asserter(asserter: Guest, what: str, **request: Any) -> dict[str, Any]:
    try:
        answer = await asserter.ask(what, max_output_bytes=MAX_REQUEST_BYTES, **request)
    except OutputCutError:
        raise DataError(
            "a test hands over too much",
            expected=f"at most {MAX_REQUEST_BYTES} bytes of JSON in one call",
        ) from None
    return cast("dict[str, Any]", answer)


def _judge(verdict: dict[str, Any], test: AssertTest) -> None:
    if verdict["ungradable"]:
        raise DataError(
            f"{verdict['ungradable']}: {test.source!r:.200}",
            expected="asserts on what functions of the code return",
        )
    if verdict["verdict"] is not True:
        last = f" ({verdict['last']})" if verdict["last"] else ""
        raise TestFailure(f"{verdict['error'] or 'it failed'}{last}")


def output_limit(expected: str) -> int:
    """Return how many bytes of output to read if `expected` is the right output.

    The right output may have more digits, spaces or brackets than the expected one.

    Raises:
        DataError: If the limit would be too large: correct code could not pass.
    """
    limit = MIN_OUTPUT_BYTES + 8 * len(expected.encode(errors="replace"))
    if limit > MAX_OUTPUT_BYTES:
        raise DataError(
            f"a test expects {len(expected)} characters",
            expected=f"at most {(MAX_OUTPUT_BYTES - MIN_OUTPUT_BYTES) // 8} bytes",
        )
    return limit


def read_value(value: Any) -> Any:
    """Rebuild a value on the host.

    Raises:
        TestFailure: If it is not a value that a guest writes.
    """
    try:
        return decode(value, lambda _, kind: Opaque(kind))
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise TestFailure("what it returned cannot be read") from error


def show_value(value: Any) -> str:
    """Return the text of a value, or of its type if it is too large."""
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python does not print integers of thousands of digits
        return f"<{type(value).__name__}, too large to show>"


def check_end(execution: Execution) -> None:
    """Raise unless an execution ran to its end.

    Raises:
        TestFailure: With the reason.
    """
    if execution.end in _ENDS:
        is_late = execution.end is ExecutionEnd.TIMEOUT
        raise TestFailure(_ENDS[execution.end], is_late=is_late)
    if not execution.is_ok:
        lines = execution.stderr.strip().splitlines()
        raise TestFailure(
            f"it raised {lines[-1]}" if lines else f"its exit code is {execution.exit_code}"
        )


def _find_answer(execution: Execution, mark: str) -> dict[str, Any]:
    marked = [line for line in execution.stdout.splitlines() if line.startswith(mark)]
    if not marked:
        check_end(execution)
        if execution.num_cut_bytes:
            raise OutputCutError("it printed too much")
        raise TestFailure("it gave no answer")
    try:
        answer = json.loads(marked[-1].removeprefix(mark))
    except (ValueError, RecursionError) as error:
        kind = OutputCutError if execution.num_cut_bytes else TestFailure
        raise kind("what it returned is too large to read") from error
    if not isinstance(answer, dict):
        raise TestFailure("what it returned cannot be read")
    return cast("dict[str, Any]", answer)


@cache
def _prelude(role: Role) -> str:
    """Return code that defines the guest's modules in an interpreter, under their own names."""
    folder = Path(__file__).parent
    texts = {
        f"{__package__}.{name}": (folder / f"{name}.py").read_text(encoding="utf-8")
        for name in _MODULES[role]
    }
    return (
        "import sys as _agentrl_sys\n"
        f"for _agentrl_name, _agentrl_text in {texts!r}.items():\n"
        "    _agentrl_module = type(_agentrl_sys)(_agentrl_name)\n"
        "    _agentrl_sys.modules[_agentrl_name] = _agentrl_module\n"
        "    exec(compile(_agentrl_text, _agentrl_name, 'exec'), _agentrl_module.__dict__)\n"
        "_agentrl_serve = _agentrl_module.serve\n"
    )
