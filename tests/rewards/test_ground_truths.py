"""Bundled scorers raise if they cannot compare, and score 0 only if the answer is wrong."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from agentrl.compat import scoring as compat
from agentrl.compat import tools
from agentrl.errors import RewardError
from agentrl.rewards import gsm8k, math_answer, math_dapo, multiple_choice, qa
from agentrl.rewards.judge import Judge
from agentrl.tools.gsm8k_tool import Gsm8kTool

NOT_FINITE = [
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    "NaN",
    " inf ",
    np.float64("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("-Infinity"),
]
NO_GROUND_TRUTHS = [None, {}, {"a": 1}, "", "  ", True, [], [None], [{"a": 1}], *NOT_FINITE]
SCORERS = [gsm8k, math_answer, math_dapo, qa, multiple_choice]


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("truth", NO_GROUND_TRUTHS, ids=repr)
def test_an_invalid_ground_truth_is_an_error_that_shows_it(scorer: Any, truth: Any):
    for solution in (r"#### 42 \boxed{42} <answer>42</answer>", ""):
        with pytest.raises(RewardError, match="the ground truth is") as caught:
            scorer.compute_score("a/source", solution, truth)
        assert "expected: " in str(caught.value)
        if not isinstance(truth, list) or truth:
            assert "'a/source'" in str(caught.value)


@pytest.mark.parametrize("truth", [*NO_GROUND_TRUTHS, ["42"], "forty-two", "#### 42"], ids=repr)
@pytest.mark.parametrize("tool", [tools.Gsm8kTool, Gsm8kTool, tools.Geo3kTool])
async def test_a_tool_refuses_a_ground_truth_with_which_it_cannot_compare(tool: Any, truth: Any):
    if tool is tools.Geo3kTool and truth in ("forty-two", "#### 42"):
        return  # texts, which it compares
    with pytest.raises(RewardError, match="the ground truth is"):
        await tool({}).create("r", ground_truth=truth)


@pytest.mark.parametrize("truth", NOT_FINITE[:3])
async def test_the_judge_takes_no_number_that_is_not_finite(truth: float):
    judge = Judge(model="m", base_url="http://localhost:1/v1", api_key="k", rubric="Right?")
    with pytest.raises(RewardError, match="the ground truth is"):
        await judge("a/source", "It is 42.", truth)


@pytest.mark.parametrize("score", [compat.acc_reward, compat.score_gsm8k, compat.score_math])
def test_scorers_of_verl_refuse_it_too(score: Any):
    for truth in NO_GROUND_TRUTHS:
        with pytest.raises(RewardError, match="the ground truth is"):
            score(r"#### 42 \boxed{42}", truth)


@pytest.mark.parametrize("truth", [["42"], "forty-two", "nan", "#### 42"])
def test_gsm8k_compares_with_numbers_alone(truth: Any):
    with pytest.raises(RewardError, match="expected: a number"):
        gsm8k.compute_score("openai/gsm8k", "#### 42", truth)


@pytest.mark.parametrize("truth", ["42", 42, 42.0, "$42", " 42 ", "42.0"])
def test_gsm8k_takes_a_number_in_every_form(truth: Any):
    assert gsm8k.compute_score("openai/gsm8k", "#### 42", truth)["score"] == 1.0
