"""Score a solution that is code, by the tests of its row, in the sandbox."""

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

    What the tests expect is compared outside the interpreter in which the solution runs, so it
    cannot say of itself that it passed (see `agentrl.sandbox.grading`).

    Args:
        data_source: Taken for the convention of scorers; not read.
        solution_str: The solution, of which thoughts are left out. Where it has no fenced block,
            the whole of it is the code.
        ground_truth: The tests; `agentrl.sandbox.grading.read_tests` says in which forms.
        extra_info: Taken for the convention of scorers; not read.
        sandbox: Where the code runs: a run hands that of `reward.sandbox` over. None: one of the
            default keys, made for this call alone.
        continuous: Score the share of the tests that pass; else 1.0 where all do, and 0.0.
        test_timeout_s: Seconds of one test.
        total_timeout_s: Seconds of all tests of one solution. Keep it below `reward.timeout_s`:
            a scorer that is late is a failure of the scorer, slow code is one of the model.
        max_tests: Tests that are run: the first ones, where there are more.
        format_score: For code that passes no test, in a fenced block.

    Returns:
        `score`, and apart from it `acc` (1.0 where all tests passed), `num_tests`, `num_passed`,
        `passed_frac`, `answered` (1.0 where there is a fenced block).

    Raises:
        DataError: for a ground truth that holds no tests, or none that can grade.
        SandboxError: where the sandbox failed.
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
    async with _open(sandbox) as room:
        found = await grade(code, tests, room, limits)
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
    """Give the caller's sandbox; or one that ends with the block."""
    if given is not None:
        yield given
        return
    made = make_sandbox(SandboxConfig())
    try:
        yield made
    finally:
        await made.close()
