"""Carry what asserts need of the graded code from one interpreter to the other."""

from typing import Any, cast

from agentrl.errors import DataError
from agentrl.sandbox.grading.cases import AssertTest
from agentrl.sandbox.grading.exchange import (
    Clock,
    Guest,
    GuestRaisedError,
    OutputCutError,
    TestFailure,
)

MAX_REQUESTS = 10_000
"""Calls and the like that the asserts of one test may make."""
MAX_ANSWER_BYTES = 2 * 1024**2
"""JSON of one value that asserts fetch of the code; more counts as a failure of the code."""
MAX_REQUEST_BYTES = 8 * 1024**2
"""JSON of the arguments of one call of the code; a test with more is a mistake of the row."""


async def relay_asserts(
    code: str, test: AssertTest, callee: Guest, asserter: Guest, clock: Clock
) -> None:
    """Run test code in one interpreter against the code in another.

    Raises:
        TestFailure: where the code does not pass.
        DataError: where the test can grade nothing.
        SandboxError: where the sandbox failed.
    """
    await callee.ask("load", code=code, timeout_s=clock.left_s, max_output_bytes=MAX_ANSWER_BYTES)
    said = await _ask_asserter(
        asserter, "begin", clock, source=test.source, entry_point=test.entry_point
    )
    for _ in range(MAX_REQUESTS):
        if "verdict" in said:
            return _judge(said, test)
        answer = await _answer(callee, said, clock)
        said = await _ask_asserter(asserter, "go_on", clock, answer=answer)
    raise TestFailure(f"the asserts made more than {MAX_REQUESTS} requests")


async def _ask_asserter(asserter: Guest, what: str, clock: Clock, **request: Any) -> dict[str, Any]:
    try:
        said = await asserter.ask(
            what, timeout_s=clock.left_s, max_output_bytes=MAX_REQUEST_BYTES, **request
        )
    except OutputCutError:
        raise DataError(
            "a test hands over too much",
            expected=f"at most {MAX_REQUEST_BYTES} bytes of JSON in one call",
        ) from None
    return cast("dict[str, Any]", said)


async def _answer(callee: Guest, request: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Do what the asserts ask for; what the code raises is an answer."""
    what = str(request.pop("ask"))
    try:
        return {
            "value": await callee.ask(
                what, timeout_s=clock.left_s, max_output_bytes=MAX_ANSWER_BYTES, **request
            )
        }
    except GuestRaisedError as error:
        return error.answer


def _judge(said: dict[str, Any], test: AssertTest) -> None:
    if said["ungradable"]:
        raise DataError(
            f"{said['ungradable']}: {test.source!r:.200}",
            expected="asserts on what functions of the code return",
        )
    if said["verdict"] is not True:
        last = f" ({said['last']})" if said["last"] else ""
        raise TestFailure(f"{said['error'] or 'it failed'}{last}")
