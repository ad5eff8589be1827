"""Parse ground truths of bundled scorers; raise if a ground truth cannot be read."""

from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any

from agentrl.errors import RewardError


def read_text(truth: Any, *, expected: str) -> str:
    """Read a right answer that is a text or a number, as a text.

    Args:
        truth: As the row has it.
        expected: What the scorer compares with, for the error.

    Raises:
        RewardError: for anything else: null, a truth value, a list, a mapping, an empty text.
    """
    is_plain = not isinstance(truth, bool) and isinstance(truth, str | Number)
    text = str(truth).strip() if is_plain else ""
    if not text:
        raise RewardError(f"the ground truth is {truth!r:.200}", expected=expected)
    return text


def read_number(truth: Any) -> str:
    """Read a right answer that is a number, with or without `$` and commas, as a text.

    Raises:
        RewardError: for anything else.
    """
    text = read_text(truth, expected="a number")
    try:
        is_number = Decimal(text.replace("$", "").replace(",", "")).is_finite()
    except InvalidOperation:
        is_number = False
    if not is_number:
        raise RewardError(f"the ground truth is {truth!r:.200}", expected="a number")
    return text
