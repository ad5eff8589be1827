"""Bundled scorers raise if they cannot compare, and score 0 only if the answer is wrong."""

from typing import Any

import pytest

from agentrl.errors import RewardError
from agentrl.rewards import gsm8k, math_answer, multiple_choice, qa

NO_GROUND_TRUTHS = [None, {}, {"a": 1}, "", "  ", True, [], [None], [{"a": 1}]]


@pytest.mark.parametrize("scorer", [gsm8k, math_answer, qa, multiple_choice])
@pytest.mark.parametrize("truth", NO_GROUND_TRUTHS, ids=repr)
def test_an_invalid_ground_truth_is_an_error_that_shows_it(scorer: Any, truth: Any):
    for solution in (r"#### 42 \boxed{42} <answer>42</answer>", ""):
        with pytest.raises(RewardError, match="the ground truth is"):
            scorer.compute_score("any", solution, truth)


@pytest.mark.parametrize("truth", [["42"], "forty-two", "nan", "#### 42"])
def test_gsm8k_compares_with_numbers_alone(truth: Any):
    with pytest.raises(RewardError, match="expected: a number"):
        gsm8k.compute_score("openai/gsm8k", "#### 42", truth)


@pytest.mark.parametrize("truth", ["42", 42, 42.0, "$42", " 42 ", "42.0"])
def test_gsm8k_takes_a_number_in_every_form(truth: Any):
    assert gsm8k.compute_score("openai/gsm8k", "#### 42", truth)["score"] == 1.0
