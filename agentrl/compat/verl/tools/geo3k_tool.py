"""`verl.tools.geo3k_tool`: score answers to a problem of geometry."""

from agentrl.compat.verl.tools.gsm8k_tool import Gsm8kTool
from agentrl.rewards.math_answer import is_same_answer


class Geo3kTool(Gsm8kTool):
    """Score answers to a problem of Geometry3K, compared as mathematics (extra `math`)."""

    def judge(self, answer: str, ground_truth: str) -> tuple[str, float]:
        """Compare an answer; it is not boxed."""
        return answer, float(is_same_answer(answer, ground_truth))

    def describe(self, answer: str, number: str, score: float) -> str:
        """Word a score as verl does."""
        return super().describe(answer, "a number or not", score)
