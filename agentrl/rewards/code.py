"""Score code by the tests of its row, in the sandbox."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from agentrl.answers import without_thought
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.sandbox import Sandbox, make_sandbox
from agentrl.sandbox.grading import GradingLimits, grade, last_code_block, read_tests


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
    continuous: bool = False,
    test_timeout_s: float = 5.0,
    total_timeout_s: float = 40.0,
    max_tests: int = 32,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Run the tests against the last fenced block of Python in the solution.

    Results are compared outside the interpreter in which the solution runs, so the solution cannot
    claim to have passed (see `agentrl.sandbox.grading`).

    Args:
        data_source: Not read.
        solution_str: The solution; thoughts are not read. Without a fenced block, the whole
            solution is the code.
        ground_truth: The tests, in a format of `agentrl.sandbox.grading.read_tests`.
        extra_info: Not read.
        sandbox: Runs the code. A run passes the one of `reward.sandbox`. None makes one with the
            default keys for this call.
        continuous: Score the share of the tests that pass; else 1.0 if all pass, and 0.0.
        test_timeout_s: Seconds for one test.
        total_timeout_s: Seconds for all tests of one solution. Keep it below `reward.timeout_s`: a
            late scorer is a failure of the scorer, slow code is a failure of the model.
        max_tests: Number of tests to run: the first ones, if there are more.
        format_score: Score of code in a fenced block that passes no test.

    Returns:
        `score`, `acc` (1.0 if all tests passed), `num_tests`, `num_passed`, `passed_frac`,
        `answered` (1.0 if there is a fenced block).

    Raises:
        DataError: If the ground truth contains no test, or a test that cannot grade.
        SandboxError: If the sandbox failed.
    """
    tests = read_tests(ground_truth)
    said = without_thought(solution_str)
    block = last_code_block(said)
    limits = GradingLimits(
        test_timeout_s=test_timeout_s,
        total_timeout_s=total_timeout_s,
        max_tests=max_tests,
        stops_at_failure=not continuous,
    )
    code = said if block is None else block
    async with _open(sandbox) as opened:
        found = await grade(code, tests, opened, limits)
    earned = found.passed_frac if continuous else float(found.passed_all)
    return {
        "score": earned or (0.0 if block is None else format_score),
        "acc": float(found.passed_all),
        "num_tests": float(found.num_tests),
        "num_passed": float(found.num_passed),
        "passed_frac": found.passed_frac,
        "answered": float(block is not None),
    }


@asynccontextmanager
async def _open(given: Sandbox | None) -> AsyncGenerator[Sandbox]:
    """Yield the caller's sandbox, or one that is closed after the block."""
    if given is not None:
        yield given
        return
    made = make_sandbox(SandboxConfig())
    try:
        yield made
    finally:
        await made.close()
