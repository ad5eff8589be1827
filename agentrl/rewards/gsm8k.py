"""Score a solution in the format of GSM8K."""

from typing import Any

from agentrl.answers import (
    Method,
    extract_gsm8k_answer,
    read_number,
    same_number,
    without_thought,
)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Method = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
    require_tool: bool = False,
) -> dict[str, Any]:
    """Compare the answer that a solution gives with the true one, as numbers.

    Args:
        data_source: Named in errors.
        solution_str: The solution; thoughts are not read (verl reads them).
        ground_truth: The true number, as a text or a number.
        extra_info: `num_tool_calls` is read.
        method: `strict` reads the number after `####`; `flexible` the last number anywhere.
        score: Score of the right answer.
        format_score: Score of a wrong answer that could be read.
        require_tool: Whether an answer counts only if a tool has answered a call.

    Returns:
        `score`, `acc` (1.0 if the answer is right), `answered` (1.0 if one could be read),
        `used_tool` (1.0 if a tool has answered a call) and `success` (1.0 if the answer is right
        and counts).

    Raises:
        RewardError: If the ground truth is no number.
    """
    truth = read_number(ground_truth, data_source=data_source)
    answer = extract_gsm8k_answer(without_thought(solution_str), method)
    right = answer is not None and same_number(answer, truth)
    used_tool = sum((extra_info or {}).get("num_tool_calls", {}).values()) > 0
    counts = used_tool or not require_tool
    earned = score if right else format_score if answer is not None else 0.0
    return {
        "score": earned if counts else 0.0,
        "success": float(right and counts),
        "acc": float(right),
        "answered": float(answer is not None),
        "used_tool": float(used_tool),
    }
