"""`verl.utils.reward_score.geo3k`: a right answer, and the form of the solution."""

import re

from agentrl.rewards.math_answer import is_same_answer, last_boxed

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Score the form: a thought, then a box."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Score the answer: the last box, or the whole text."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and is_same_answer(answer, ground_truth))


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Weigh answer and form."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
