r"""Score the answer of a mathematical problem as DAPO does: 1 if it is right, else -1.

Source: DAPO (arXiv 2503.14476); its prompts ask for a last line `Answer: ...`. Answers are compared
as in `agentrl.rewards.math_answer`.
"""

import re
from typing import Any

from agentrl.answers import is_same_answer, last_boxed, read_text, without_thought

LONGEST_TAIL = 300
"""Characters at the end of a solution that are searched for the answer."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    strict_box_verify: bool = False,
) -> dict[str, Any]:
    r"""Compare the answer at the end of a solution with the true one.

    Args:
        data_source: Named in errors.
        solution_str: The solution; thoughts are not read.
        ground_truth: The true answer, in LaTeX or as a number.
        extra_info: Not read.
        strict_box_verify: Read only the last `\boxed{}`. Otherwise it is read if there is no line
            `Answer: ...`, which verl's scorer calls wrong.

    Returns:
        `score` (1.0 or -1.0), `acc` and `success` (1.0 if the answer is right), `pred` (the answer;
        empty if there is none).

    Raises:
        RewardError: If the ground truth is empty, or no text and no number.
    """
    truth = read_text(ground_truth, expected="an answer", data_source=data_source)
    said = without_thought(solution_str)[-LONGEST_TAIL:]
    lines = [] if strict_box_verify else _ANSWER.findall(said)
    answer = str(lines[-1]).strip("$ ") if lines else said
    answer = last_boxed(answer) or (answer if lines else "")
    is_right = bool(answer) and is_same_answer(answer, truth)
    return {
        "score": 1.0 if is_right else -1.0,
        "acc": float(is_right),
        "success": float(is_right),
        "pred": answer,
    }
