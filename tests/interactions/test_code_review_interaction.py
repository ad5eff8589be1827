"""The reviewer of code: what it says, when it is content, when it gives up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import ConfigError, DataError, MissingExtraError, SandboxError
from agentrl.interactions import InteractionResult, initialize_interactions_from_config
from agentrl.interactions.code_review_interaction import CodeReviewInteraction, Linter
from agentrl.interactions.session import InteractionSession
from agentrl.messages import Message
from agentrl.plugins.environment import num_cores
from agentrl.sandbox.factory import SharedSandbox
from agentrl.sandbox.grading import grading_semaphore
from tests.fakes.sandbox import BusySandbox

CONFIG = Path(__file__).resolve().parents[2] / "configs/interaction_config/code_review.yaml"
TESTS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
RIGHT = "print(sum(map(int, input().split())))"
WRONG = "import os\na, b = map(int, input().split())\nprint(a * b + 1)\n"

Review = Callable[..., Any]


@pytest.fixture
async def reviewer() -> AsyncIterator[CodeReviewInteraction]:
    made = CodeReviewInteraction({"name": "code_review", "max_rounds": 1})
    yield made
    await made.shutdown()


async def answered(
    reviewer: CodeReviewInteraction, *codes: str | None, **kwargs: Any
) -> list[InteractionResult]:
    """One request: start it, let it hear an answer with each code, finalise it."""
    instance_id = await reviewer.start_interaction("r", **(kwargs or {"tests": TESTS}))
    replies: list[InteractionResult] = []
    for code in codes:
        text = "I cannot." if code is None else f"Here:\n```python\n{code}\n```"
        messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": text}]
        replies.append(await reviewer.generate_response(instance_id, messages))
    await reviewer.finalize_interaction(instance_id)
    await reviewer.finalize_interaction(instance_id)
    assert vars(reviewer)["_reviews"] == {}
    return replies


async def test_failures_are_data_right_code_is_right_however_many_reviews_there_are():
    crowd = BusySandbox("3")
    reviewer = CodeReviewInteraction({"name": "code_review"})
    vars(reviewer)["_shared"] = SharedSandbox(SandboxConfig(), lambda _: crowd)
    tests = {"inputs": ["1 2"], "outputs": ["3"]}
    said = Message(role="assistant", content=f"```python\n{RIGHT}\n```")

    async def review(place: int) -> InteractionResult:
        session = InteractionSession(reviewer, instance_id=str(place), kwargs={"tests": tests})
        await session.start()
        return await session.respond([said])

    replies = await asyncio.gather(*(review(place) for place in range(4 * num_cores())))
    assert {reply.score for reply in replies} == {1.0}
    assert crowd.most_running == num_cores()


async def test_a_review_waits_while_scorers_grade():
    reviewer = CodeReviewInteraction({"name": "code_review"})
    vars(reviewer)["_shared"] = SharedSandbox(SandboxConfig(), lambda _: BusySandbox("3"))
    kwargs = {"tests": {"inputs": ["1 2"], "outputs": ["3"]}}
    session = InteractionSession(reviewer, instance_id="r", kwargs=kwargs)
    await session.start()
    said = Message(role="assistant", content=f"```python\n{RIGHT}\n```")
    async with AsyncExitStack() as others:
        for _ in range(num_cores()):
            await others.enter_async_context(grading_semaphore())
        waiting = asyncio.create_task(session.respond([said]))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
    assert (await waiting).score == 1.0


async def test_findings_and_the_first_failing_test_are_in_the_reply(
    reviewer: CodeReviewInteraction,
):
    wrong, right = await answered(reviewer, WRONG, RIGHT)
    assert (wrong.should_terminate, wrong.score) == (False, 0.5)
    assert wrong.content.splitlines() == [
        "The static checks say:",
        "- line 1: `os` imported but unused (F401)",
        "1 of 2 tests pass.",
        "The first that fails:",
        "  test: 3 4",
        "  expected: 7",
        "  your code: 13",
        "Fix it, and write the whole program again in one ```python block.",
    ]
    assert wrong.metadata == {
        "num_rounds": 1,
        "num_tests": 2,
        "num_passed": 1,
        "num_findings": 1,
    }
    assert (right.should_terminate, right.score) == (True, 1.0)
    assert right.content == "All 2 tests pass."


async def test_the_conversation_ends_when_the_rounds_are_used_up(
    reviewer: CodeReviewInteraction,
):
    first, last = await answered(reviewer, None, WRONG)
    assert (first.should_terminate, first.score) == (False, 0.0)
    assert "no code" in first.content
    assert (last.should_terminate, last.content, last.score) == (True, "", 0.5)


async def test_code_that_cannot_be_read_and_code_that_cheats_score_nothing(
    reviewer: CodeReviewInteraction,
):
    (broken,) = await answered(reviewer, "print(1")
    assert (broken.score, broken.should_terminate) == (0.0, False)
    assert "(syntax)" in broken.content
    (cheat,) = await answered(reviewer, "import sys\nprint('OK')\nsys.exit(0)")
    assert cheat.score == 0.0


async def test_the_ground_truth_will_do_for_tests(reviewer: CodeReviewInteraction):
    code = "def double(x):\n    return x + x\n"
    (reply,) = await answered(reviewer, code, ground_truth=["assert double(2) == 4"])
    assert reply.score == 1.0
    with pytest.raises(DataError):
        await answered(reviewer, code, name="code_review")


async def test_the_reply_is_bounded():
    reviewer = CodeReviewInteraction({"max_findings": 2, "rules": ["F"]})
    names = "\n".join(f"import m{i}" for i in range(50))
    (reply,) = await answered(reviewer, f"{names}\nprint('x' * 100000)")
    await reviewer.shutdown()
    assert "- and 48 more" in reply.content
    assert len(reply.content) < 1500


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"max_rounds": -1}, "max_rounds"),
        ({"rules": []}, "rules"),
        ({"total_timeout_s": 0}, "total_timeout_s"),
        ({"sandbox": {"tmeout_s": 1}}, "sandbox.tmeout_s"),
    ],
)
def test_a_wrong_key_is_named(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as error:
        CodeReviewInteraction(config)
    assert error.value.details["key"] == key


def test_what_is_not_there_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(SandboxError, match="trusted"):
        CodeReviewInteraction({"sandbox": {"provider": "subprocess"}})
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip install .ruff"):
        CodeReviewInteraction({})


async def test_a_rule_that_ruff_does_not_know_is_an_error():
    with pytest.raises(RuntimeError, match="NOPE"):
        await Linter(["NOPE1"]).check("x = 1")


def test_the_bundled_file_loads():
    assert list(initialize_interactions_from_config(CONFIG)) == ["code_review"]
