"""`verl.utils.reward_score.gsm8k`."""

from typing import Any

from agentrl.answers import Method, extract_gsm8k_answer
from agentrl.rewards import gsm8k


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Find the answer in a solution; None if there is none."""
    return extract_gsm8k_answer(solution_str, method)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score a solution of GSM8K (see `agentrl.rewards.gsm8k.compute_score`)."""
    found = gsm8k.compute_score(
        "openai/gsm8k",
        solution_str,
        ground_truth,
        method=method,
        format_score=format_score,
        score=score,
    )
    return found["score"]
