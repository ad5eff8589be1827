"""Compare the output or the return value of code with the expected one."""

import math
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any, cast

TOLERANCE = 1e-6
"""Allowed difference of decimal numbers, absolute or relative."""


def same_text(got: str, expected: str) -> bool:
    r"""Compare two outputs line by line.

    White space at line ends and the notation of numbers (`2` and `2.0`, digits after the sixth)
    make no difference.

    Example:
        >>> same_text("3.0 yes \n\n", "3 yes"), same_text("a b", "a  c")
        (True, False)
    """
    pairs = zip_longest(_lines(got), _lines(expected))
    return all(left == right or _same_line(left, right) for left, right in pairs)


def same_value(got: Any, expected: Any) -> bool:
    """Compare a returned value with the expected one, which came from JSON.

    A tuple equals a list, keys may have become texts, and decimals may differ by `TOLERANCE`.

    Example:
        >>> same_value((1, 2.0000000001), [1, 2]), same_value("1", 1)
        (True, False)
    """
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        lefts, rights = cast("list[Any]", got), cast("list[Any]", expected)
        return len(lefts) == len(rights) and all(map(same_value, lefts, rights))
    if isinstance(got, dict) and isinstance(expected, dict):
        left, right = _texts_for_keys(got), _texts_for_keys(expected)  # pyright: ignore
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    if isinstance(got, float) or isinstance(expected, float):
        return _close(got, expected)
    return got == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_line(left: str | None, right: str | None) -> bool:
    if left is None or right is None:
        return False
    lefts, rights = left.split(), right.split()
    return len(lefts) == len(rights) and all(map(_same_word, lefts, rights))


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        numbers = Decimal(left), Decimal(right)
    except InvalidOperation:
        return False
    if not all(number.is_finite() for number in numbers):
        return False
    is_whole = all("." not in word and "e" not in word.lower() for word in (left, right))
    return numbers[0] == numbers[1] or (not is_whole and _close(*map(float, numbers)))


def _close(left: Any, right: Any) -> bool:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return False
    try:
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that no float holds
        return False


def _texts_for_keys(mapping: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in mapping.items()}
