"""Ask the guest in one interpreter for something, and read its answer, which may be a lie."""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.errors import DataError
from agentrl.sandbox.base import Execution, ExecutionEnd, Sandbox, Session
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
"""Output that is read of a program or function, however little is expected."""
MAX_OUTPUT_BYTES = 32 * 1024**2
"""Output that is read at most; what is expected may have an eighth of it."""


class TestFailure(Exception):  # noqa: N818 - a verdict, and no error
    """A test that the code did not pass. Its text says why, for whoever wrote the code.

    Args:
        text: What went wrong, or what came instead.
        is_late: Whether it did not end in time.
    """

    __test__ = False  # what pytest would collect

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


class OutputCutError(TestFailure):
    """There is no answer, because more was printed than is read."""


class GuestRaisedError(TestFailure):
    """What was asked for raised."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = {"error": str(answer["error"]), "message": str(answer.get("message", ""))}
        told = f"{self.answer['error']}: {self.answer['message']}".rstrip(": ")
        super().__init__(f"it raised {told}")


class Opaque:
    """Stands on the host for an object of the code that is no data. It equals nothing."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


class Guest:
    """An interpreter of the sandbox with the guest in it.

    Args:
        session: A new one; whoever opened it closes it.
        role: What the guest is for.
    """

    def __init__(self, session: Session, role: Role) -> None:
        self._session = session
        self._prelude = _prelude(role)

    async def ask(
        self, what: str, *, timeout_s: float, max_output_bytes: int, **request: Any
    ) -> Any:
        """Have something done, and give the answer as JSON has it.

        Raises:
            GuestRaisedError: where it raised.
            OutputCutError: if it printed more than `max_output_bytes`.
            TestFailure: where there is no answer.
            SandboxError: where the sandbox failed.
        """
        mark = f"answer-{secrets.token_hex(8)}:"
        asked = json.dumps({"ask": what, **request})
        source = f"{self._prelude}_agentrl_serve({mark!r}, {asked!r})"
        execution = await self._session.run(
            source, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )
        self._prelude = ""
        answer = _find_answer(execution, mark)
        if "error" in answer:
            raise GuestRaisedError(answer)
        return answer.get("value")


class Clock:
    """What is left of a time limit.

    Args:
        timeout_s: All of it, in seconds, from now on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._due = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left.

        Raises:
            TestFailure: where none are.
        """
        left_s = self._due - time.monotonic()
        if left_s <= 0:
            raise TestFailure(_ENDS[ExecutionEnd.TIMEOUT], is_late=True)
        return left_s


@asynccontextmanager
async def guests(sandbox: Sandbox, *roles: Role) -> AsyncGenerator[tuple[Guest, ...]]:
    """Open fresh interpreters with a guest in each, and end them."""
    async with AsyncExitStack() as stack:
        sessions: list[Session] = []
        for _ in roles:
            sessions.append(await sandbox.open_python())
            stack.push_async_callback(sessions[-1].close)
        yield tuple(map(Guest, sessions, roles))


def output_limit(expected: str) -> int:
    """Compute how much output is read where this is expected, in bytes.

    What is right may be written with more digits, spaces or brackets than what is expected.

    Raises:
        DataError: if that is too much to read: right code could not pass.
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
        TestFailure: for what is none.
    """
    try:
        return decode(value, lambda _, kind: Opaque(kind))
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise TestFailure("what it returned cannot be read") from error


def show_value(value: Any) -> str:
    """Show a value, which may be too large to be shown."""
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of thousands of digits
        return f"<{type(value).__name__}, too large to show>"


def check_end(execution: Execution) -> None:
    """Let an execution pass that ran to its end.

    Raises:
        TestFailure: for any other, in words.
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
    """Write what brings the guest into an interpreter: its modules, under their own names."""
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
