"""The scorer of code: what it takes as the code, what it gives, and whose fault a failure is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.config.sandbox_schema import SandboxConfig
from agentrl.errors import DataError, SandboxError
from agentrl.rewards import code
from agentrl.rewards.code import compute_score
from agentrl.rewards.scoring import read_score
from agentrl.sandbox import Sandbox, make_sandbox

TESTS = {"inputs": ["1 2", "3 4", "5 5"], "outputs": ["3", "7", "10"]}
RIGHT = "It adds.\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
SMALL = "```python\na, b = map(int, input().split())\nprint(a + b if a > 1 else 0)\n```"
FAKE = "```python\nimport os\nprint('passed')\nos._exit(0)\n```"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig())
    yield made
    await made.close()


async def scored(solution: str, sandbox: Any, tests: Any = None, **kwargs: Any) -> dict[str, Any]:
    found = await compute_score("apps", solution, tests or TESTS, None, sandbox=sandbox, **kwargs)
    assert read_score(found).value == found["score"]
    return found


async def test_all_or_nothing_is_the_default_and_the_share_is_asked_for(sandbox: Sandbox):
    assert await scored(RIGHT, sandbox) == {
        "score": 1.0,
        "acc": 1.0,
        "num_tests": 3.0,
        "num_passed": 3.0,
        "passed_frac": 1.0,
        "answered": 1.0,
    }
    part = await scored(SMALL, sandbox)
    assert (part["score"], part["acc"], part["num_tests"]) == (0.0, 0.0, 3.0)
    share = await scored(SMALL, sandbox, continuous=True)
    assert share["score"] == pytest.approx(2 / 3)
    assert (share["acc"], share["num_passed"]) == (0.0, 2.0)


async def test_an_answer_without_a_block_is_code_as_a_whole(sandbox: Sandbox):
    bare = await scored("print(sum(map(int, input().split())))", sandbox)
    assert (bare["score"], bare["answered"]) == (1.0, 0.0)
    prose = await scored("I cannot do it.", sandbox, format_score=0.1)
    assert (prose["score"], prose["answered"]) == (0.0, 0.0)
    wrong = await scored(FAKE, sandbox, format_score=0.1)
    assert (wrong["score"], wrong["acc"], wrong["answered"]) == (0.1, 0.0, 1.0)


async def test_a_row_without_tests_is_the_rows_fault(sandbox: Sandbox):
    with pytest.raises(DataError):
        await scored(RIGHT, sandbox, tests={"outputs": ["3"]})


async def test_a_sandbox_that_cannot_be_had_fails_the_scoring_and_not_the_code():
    with pytest.raises(SandboxError):
        await scored(RIGHT, {"provider": "subprocess"})
    nowhere = {"provider": "sandbox_fusion", "url": "http://127.0.0.1:9"}
    with pytest.raises(SandboxError):
        await scored(RIGHT, nowhere)
    await code.shutdown()


async def test_one_sandbox_serves_all_scores_of_a_run_and_ends_with_it():
    config = {"timeout_s": 7.0}
    found = await asyncio.gather(*(scored(RIGHT, config) for _ in range(4)))
    assert [score["score"] for score in found] == [1.0] * 4
    assert len(vars(code)["_SHARED"]) == 1
    await code.shutdown()
    assert not vars(code)["_SHARED"]
    assert (await scored(RIGHT, SandboxConfig(timeout_s=7.0)))["score"] == 1.0
    await code.shutdown()


def test_scoring_works_in_one_event_loop_after_another():
    async def once() -> float:
        score = (await scored(RIGHT, {}))["score"]
        await code.shutdown()
        return score

    assert [asyncio.run(once()) for _ in range(2)] == [1.0, 1.0]
