"""`verl.tools.gsm8k_tool`: agentrl's tool, with verl's text."""

from agentrl.tools.gsm8k_tool import Gsm8kTool as OwnGsm8kTool


class Gsm8kTool(OwnGsm8kTool):
    """Score answers to a GSM8K problem, and show the policy verl's text."""

    def describe(self, answer: str, number: str, score: float) -> str:
        """Word a score as verl does, which writes 0 for an answer without a number."""
        reward = score if number else 0
        return f"Current parsed {answer=} {reward=}"
