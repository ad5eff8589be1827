"""`verl.utils.reward_score.search_r1_like_qa_em`: answers in `<answer>`, by exact match."""

from typing import Any

from agentrl.rewards import qa
from agentrl.rewards.qa import find_answer as extract_solution
from agentrl.rewards.qa import normalize as normalize_answer

__all__ = ["compute_score", "compute_score_subem", "extract_solution", "normalize_answer"]


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score an answer by exact match (see `agentrl.rewards.qa.compute_score`)."""
    keys: dict[str, Any] = {"format_score": format_score, "score": score}
    return qa.compute_score("searchR1", solution_str, ground_truth, **keys)["score"]


def compute_score_subem(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score an answer by whether a golden one is in it."""
    keys: dict[str, Any] = {"metric": "contains", "format_score": format_score, "score": score}
    return qa.compute_score("searchR1", solution_str, ground_truth, **keys)["score"]
