"""Score the policy's answers to a problem of Geometry3K."""

from typing import Any

from agentrl.answers import is_same_answer, last_boxed, read_text
from agentrl.tools.bundled import function_schema, string_parameter
from agentrl.tools.gsm8k_tool import Gsm8kTool


class Geo3kTool(Gsm8kTool):
    r"""Score answers against the ground truth, compared as mathematics (extra `math`).

    An answer may be in `\boxed{}`. Rewards, `create_kwargs` and keys are those of `Gsm8kTool`. Set
    `isolation: process`: some answers make computer algebra compute forever, and only a process of
    its own can be stopped.
    """

    default_schema = function_schema(
        "calc_geo3k_reward",
        "Score an answer to the problem: 1.0 if it is right, 0.0 if it is not.",
        answer=string_parameter("The answer: a number or an expression in LaTeX, without unit."),
    )

    def read_truth(self, ground_truth: Any) -> str:
        """Return a right answer as a text."""
        return read_text(ground_truth, expected="an answer")

    def judge(self, answer: str, ground_truth: str) -> tuple[str, float]:
        """Return an answer without its box, and its score."""
        boxed = last_boxed(answer)
        bare = (answer if boxed is None else boxed).strip()
        return bare, float(is_same_answer(bare, ground_truth))

    def describe(self, answer: str, number: str, score: float) -> str:
        """Return a score as text for the policy."""
        return f"The answer {number} is scored {score}." if number else "There is no answer in it."
