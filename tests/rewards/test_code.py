"""The scorer of code: what it takes as the code, what it gives, and whose fault a failure is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import DataError, PluginError, SandboxError
from agentrl.plugins.call import ExecutionMode
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.code import compute_score
from agentrl.rewards.loading import load_bundled
from agentrl.rewards.scoring import read_score
from agentrl.sandbox import Sandbox, make_sandbox
from agentrl.sandbox.grading import grade

TESTS = {"inputs": ["1 2", "3 4", "5 5"], "outputs": ["3", "7", "10"]}
RIGHT = "It adds.\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
SMALL = "```python\na, b = map(int, input().split())\nprint(a + b if a > 1 else 0)\n```"
FAKE = "```python\nimport os\nprint('passed')\nos._exit(0)\n```"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig())
    yield made
    await made.close()


def num_children() -> int:
    return len(psutil.Process().children(recursive=True))


async def scored(
    solution: str, sandbox: Sandbox | None, tests: Any = None, **kwargs: Any
) -> dict[str, Any]:
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
    nowhere = SandboxConfig(provider="sandbox_fusion", url="http://127.0.0.1:9")
    sandbox = make_sandbox(nowhere)
    with pytest.raises(SandboxError):
        await scored(RIGHT, sandbox)
    await sandbox.close()


async def test_a_call_without_a_sandbox_makes_one_and_ends_it():
    before = num_children()
    assert (await scored(RIGHT, None))["score"] == 1.0
    assert num_children() == before


async def test_a_run_hands_its_sandbox_over_to_as_many_gradings_as_it_has_cores(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[Sandbox] = []
    at_work: list[int] = [0]

    def make(config: SandboxConfig) -> Sandbox:
        made.append(make_sandbox(config))
        return made[-1]

    async def slow_grade(*args: Any) -> Any:
        at_work.append(at_work[-1] + 1)
        await asyncio.sleep(0.01)
        try:
            return await grade(*args)
        finally:
            at_work.append(at_work[-1] - 1)

    monkeypatch.setattr("agentrl.sandbox.factory.make_sandbox", make)
    monkeypatch.setattr("agentrl.rewards.code.grade", slow_grade)
    monkeypatch.setattr("agentrl.sandbox.grading.grader.num_cores", lambda: 2)
    scorer = load_bundled("code", {"continuous": True})
    caller = ScoreCaller(
        scorer, RewardConfig(sandbox=SandboxConfig(num_warm=0)), ExecutionMode.THREAD
    )
    arguments = {"data_source": "apps", "solution_str": SMALL, "ground_truth": TESTS}
    found = await asyncio.gather(*(caller.call(scorer, arguments) for _ in range(3)))
    await caller.close()
    assert [score["passed_frac"] for score in found] == [pytest.approx(2 / 3)] * 3
    assert len(made) == 1
    assert max(at_work) == 2


def test_a_sandbox_among_the_arguments_of_a_scorer_is_refused():
    with pytest.raises(PluginError, match=r"reward\.sandbox"):
        load_bundled("code", {"sandbox": {"timeout_s": 3}})
