"""Cut a prompt to its budget."""

from collections.abc import Sequence
from typing import Literal

from agentrl.errors import DataError

Truncation = Literal["error", "left", "right", "middle"]


def fit_prompt(ids: Sequence[int], max_length: int, truncation: Truncation) -> list[int]:
    """Cut a prompt's tokens to `max_length`; a prompt that fits comes back as it is.

    Args:
        ids: The rendered prompt.
        max_length: Tokens that may be left, at least 1.
        truncation: The side that is cut away; `error` refuses to cut.

    Raises:
        DataError: for an overlong prompt under `error`.

    Example:
        >>> fit_prompt([1, 2, 3, 4, 5], 3, "middle")
        [1, 4, 5]
    """
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        raise DataError(
            f"a prompt of {len(ids)} tokens is longer than data.max_prompt_length, {max_length}",
            expected="a larger data.max_prompt_length, data.filter_overlong_prompts, or "
            "data.truncation left, right or middle",
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]
