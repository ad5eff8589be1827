import asyncio
import subprocess
import sys

import pytest

from agentrl.config.schema.reward import BUNDLED_SCORERS, RewardConfig
from agentrl.errors import RewardError
from agentrl.rewards import default_compute_score, make_reward_manager
from agentrl.rewards.sources import BUNDLED, BY_SOURCE, PATTERNS, SOURCES, find_bundled
from tests.fakes.requests import build_request, said
from tests.fakes.scorers import score


@pytest.mark.parametrize(
    ("source", "name"),
    [("openai/gsm8k", "gsm8k"), ("lighteval/MATH", "math"), ("HuggingFaceH4/MATH-500", "math"),
     ("DigitalLearningGmbH/MATH-lighteval", "math"), ("math_dapo", "math_dapo"),
     ("math_dapo_reasoning", "math_dapo"), ("aime2024", "math_dapo"), ("math", "math_dapo"),
     ("hendrycks_math", "math"), ("humaneval", "code"),
     ("numina_olympiads", "math"), ("numina_cn_k12", "math"), ("hiyouga/geometry3k", "math"),
     ("codecontests", "code"), ("apps", "code"), ("codeforces", "code"), ("taco", "code"),
     ("searchR1_nq", "qa"), ("searchR1_hotpotqa", "qa"), ("Idavidrein/gpqa_diamond",
     "multiple_choice"), ("cais/mmlu", "multiple_choice")],
)  # fmt: skip
def test_sources_have_the_scorer_of_their_kind(source, name):
    assert find_bundled(source) == name


@pytest.mark.parametrize("source", ["openai/gms8k", "Aime2024", "mine", "", "searchr1_nq"])
def test_unknown_sources_are_named_with_the_known_ones(source):
    with pytest.raises(RewardError, match=r"reward\.custom_reward_function"):
        find_bundled(source)


def test_what_the_configuration_knows_is_what_there_is():
    assert set(BUNDLED_SCORERS) == {*BUNDLED, BY_SOURCE}
    assert {*SOURCES.values(), *(name for _, name in PATTERNS)} <= set(BUNDLED)


def test_a_mixed_batch_is_scored_each_by_its_own():
    rows = [
        ("openai/gsm8k", "#### 5", "5"),
        ("lighteval/MATH", r"\boxed{\frac{1}{2}}", "0.5"),
        ("searchR1_nq", "<answer>the Paris</answer>", {"target": ["Paris"]}),
        ("cais/mmlu", "The answer is (B)", 1),
    ]
    requests = [
        build_request(said(1, text=text), data_source=source, ground_truth=truth)
        for source, text, truth in rows
    ]
    score(make_reward_manager(RewardConfig(num_workers=1)), requests)
    assert [request.reward for request in requests] == [1.0] * 4


def test_a_scorer_of_code_is_awaited():
    async def main():
        return await default_compute_score("apps", "no code", "no tests")

    with pytest.raises(Exception, match=r"agentrl\.rewards\.code|tests"):
        asyncio.run(main())


def test_the_public_module_loads_no_heavy_package():
    heavy = ("torch", "math_verify", "sympy", "openai", "ray", "sglang")
    code = (
        "import sys, agentrl.rewards\n"
        f"found = [name for name in {heavy} if name in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
