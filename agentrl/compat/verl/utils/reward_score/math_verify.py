"""`verl.utils.reward_score.math_verify`."""

from agentrl.rewards import math_answer


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """Score a solution, with or without a box."""
    found = math_answer.compute_score("math", model_output, ground_truth, method="flexible")
    return found["score"]
