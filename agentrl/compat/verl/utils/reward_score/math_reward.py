r"""`verl.utils.reward_score.math_reward`: answers in `\boxed{}`."""

from typing import Any

from agentrl.rewards import math_answer
from agentrl.rewards.math_answer import is_same_answer, last_boxed

_LEFT = "\\boxed{"


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """Score a solution (see `agentrl.rewards.math_answer.compute_score`)."""
    return math_answer.compute_score("math", solution_str, ground_truth)["score"]


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers mean the same."""
    return str1 is not None and str2 is not None and is_same_answer(str1, str2)


def last_boxed_only_string(string: str) -> str | None:
    r"""Find the last closed `\boxed{...}`, whole; None if there is none."""
    inside = last_boxed(string)
    return None if inside is None else f"{_LEFT}{inside}}}"


def remove_boxed(s: str) -> str:
    r"""Take `\boxed{` and `}` off."""
    return s.removeprefix(_LEFT).removesuffix("}")
