"""What a policy thinks is no answer, for every bundled scorer."""

import asyncio
from typing import Any

import pytest

from agentrl.answers import without_thought
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction
from agentrl.rewards import code, gsm8k, math_answer, multiple_choice, qa
from tests.fakes.sandbox import BusySandbox

TESTS = {"inputs": ["1"], "outputs": ["4"]}
SCORERS = {
    "gsm8k": (gsm8k.compute_score, "#### 4", "4"),
    "math": (math_answer.compute_score, r"\boxed{4}", "4"),
    "multiple_choice": (multiple_choice.compute_score, "The answer is B", "B"),
    "qa": (qa.compute_score, "<answer>Bern</answer>", "Bern"),
}


@pytest.mark.parametrize("name", SCORERS)
def test_an_answer_in_a_thought_counts_for_nothing(name: str):
    score, right, truth = SCORERS[name]

    def earned(solution: str) -> float:
        return score(name, solution, truth)["score"]

    assert earned(right) == earned(f"<think>Hm.</think>{right}") == earned(f"Hm.</think>{right}")
    assert earned(right) == 1.0
    for thought in (f"<think>{right}</think> I do not know", f"{right}</think>", f"<think>{right}"):
        assert earned(thought) == 0.0


def test_code_in_a_thought_is_not_run():
    block = "```python\nprint(4)\n```"

    def score(solution: str) -> dict[str, Any]:
        sandbox = BusySandbox("4")
        return asyncio.run(code.compute_score("apps", solution, TESTS, sandbox=sandbox))

    assert score(f"<think>Hm.</think>\n{block}")["answered"] == 1.0
    assert score(f"<think>\n{block}\n</think>\nI do not know.")["answered"] == 0.0


async def test_the_user_of_gsm8k_hears_no_thought():
    user = Gsm8kInteraction({"name": "gsm8k"})
    await user.start_interaction("r", ground_truth="4")
    said = {"role": "assistant", "content": "<think>4?</think> I do not know."}
    assert (await user.generate_response("r", [said])).should_terminate is False


def test_what_is_said_aloud_stays():
    assert without_thought(" a < b, and so on ") == "a < b, and so on"
    assert without_thought("<think>a</think>b<think>c</think>d") == "d"
    assert without_thought("said<think>cut") == "said"
