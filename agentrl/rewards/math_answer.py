r"""Score the answer of a mathematical problem in `\boxed{}`.

`agentrl.answers` compares the answers. Some texts make computer algebra compute forever, so the
managers run this scorer in a process. There an alarm ends such a comparison, and the answer is
wrong. If the alarm does not work either, the process is killed.
"""

from typing import Any, cast

from agentrl.answers import (
    Method,
    is_same_answer,
    last_boxed,
    parse_answers,
    read_text,
    without_thought,
)
from agentrl.errors import RewardError

LONGEST_TAIL = 1000
"""Characters at the end of a solution in which `flexible` looks for an answer."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Method = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    r"""Compare the answer that a solution gives with the true one, as mathematics.

    Args:
        data_source: Named in errors.
        solution_str: The solution; thoughts are not read.
        ground_truth: The true answer, in LaTeX or as a number; or a list of right answers.
        extra_info: Not read.
        method: `strict` reads the last closed `\boxed{}`; `flexible`, if there is none, the last
            expression that `math_verify` finds in the last 1,000 characters.
        score: Score of the right answer.
        format_score: Score of a wrong answer in a box.

    Returns:
        `score`, `acc` (1.0 if the answer is right), `answered` (1.0 if one was found).

    Raises:
        MissingExtraError: If the extra `math` is not installed.
        RewardError: If the ground truth is empty, or no text and no number.
    """
    many = isinstance(ground_truth, list)
    listed = cast("list[Any]", ground_truth if many else [ground_truth])
    expected = "an answer, or a list of them"
    truths = [read_text(one, expected=expected, data_source=data_source) for one in listed]
    if not truths:
        raise RewardError("the ground truth is an empty list", expected="an answer")
    said = without_thought(solution_str)
    answer = last_boxed(said)
    boxed = answer is not None
    if answer is None and method == "flexible":
        tail = said[-LONGEST_TAIL:].replace("**", "")
        found = parse_answers(tail)
        texts = [part for part in found if isinstance(part, str)]
        answer = texts[-1] if texts else None
    right = answer is not None and any(is_same_answer(answer, truth) for truth in truths)
    earned = score if right else format_score if boxed else 0.0
    return {"score": earned, "acc": float(right), "answered": float(answer is not None)}
