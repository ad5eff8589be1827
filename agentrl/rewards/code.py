"""Score a solution that is code, by the tests of its row, in the sandbox."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.config.sandbox_schema import SandboxConfig
from agentrl.sandbox import Sandbox
from agentrl.sandbox.grading import GradingLimits, grade, last_code_block, read_tests
from agentrl.sandbox.shared import SharedSandbox, read_sandbox_config

MAX_GRADINGS = max(1, os.cpu_count() or 1)
"""Solutions that are graded at once: more would only take each other's time."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    sandbox: Sandbox | SandboxConfig | Mapping[str, Any] | None = None,
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
        solution_str: The solution. Where it has no fenced block, the whole of it is the code.
        ground_truth: The tests; `agentrl.sandbox.grading.read_tests` says in which forms.
        extra_info: Taken for the convention of scorers; not read.
        sandbox: Where the code runs: its keys, or a sandbox of the caller's own.
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
    block = last_code_block(solution_str)
    limits = GradingLimits(
        test_timeout_s=test_timeout_s,
        total_timeout_s=total_timeout_s,
        max_tests=max_tests,
        stops_at_failure=not continuous,
    )
    code = solution_str if block is None else block
    async with _room():
        found = await grade(code, tests, _sandbox(sandbox), limits)
    earned = found.passed_frac if continuous else float(found.passed_all)
    return {
        "score": earned or (0.0 if block is None else format_score),
        "acc": float(found.passed_all),
        "num_tests": float(found.num_tests),
        "num_passed": float(found.num_passed),
        "passed_frac": found.passed_frac,
        "answered": float(block is not None),
    }


async def shutdown() -> None:
    """End the sandboxes that `compute_score` made. Call it once, when a run ends."""
    made = list(_SHARED.values())
    _SHARED.clear()
    for shared in made:
        await shared.close()


_SHARED: dict[SandboxConfig, SharedSandbox] = {}
_ROOMS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _sandbox(given: Sandbox | SandboxConfig | Mapping[str, Any] | None) -> Sandbox:
    if given is not None and not isinstance(given, SandboxConfig | Mapping):
        return given
    config = read_sandbox_config(given, key="sandbox")
    return _SHARED.setdefault(config, SharedSandbox(config)).get()


def _room() -> asyncio.Semaphore:
    return _ROOMS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_GRADINGS))
