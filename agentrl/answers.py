"""Read the visible text of a solution, and the answer of a solution in the format of GSM8K.

The tool, the simulated user and the scorer of GSM8K use the same functions.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Method = Literal["strict", "flexible"]

_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def without_thought(text: str) -> str:
    """Return the text after the last thought. A thought without an end hides the rest.

    Example:
        >>> without_thought("<think>hm</think> Left.")
        'Left.'
    """
    return text.rpartition(_END_OF_THOUGHT)[2].partition(_BEGIN_OF_THOUGHT)[0].strip()


def extract_gsm8k_answer(text: str, method: Method = "strict") -> str | None:
    r"""Find the answer in a solution; if there are several, the last one.

    Args:
        text: The solution.
        method: `strict` reads the number after `####`, `flexible` the last number of the text.

    Returns:
        The number without `$` and thousands separators, or None.

    Example:
        >>> extract_gsm8k_answer("12 * 100 = 1200\n#### 1,200")
        '1200'
    """
    found = (_STRICT if method == "strict" else _ANY).findall(text)
    return _plain(found[-1]) if found else None


def same_number(left: str, right: str) -> bool:
    """Whether two texts are the same number. A text that is not a number equals nothing.

    Example:
        >>> same_number("1,200", "1200.0")
        True
    """
    try:
        return Decimal(_plain(left)) == Decimal(_plain(right))
    except InvalidOperation:
        return False


def _plain(number: str) -> str:
    return number.strip().replace("$", "").replace(",", "")
