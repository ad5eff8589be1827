r"""Read the visible text of a solution, and find and compare answers.

Tools, simulated users and scorers use the same functions: those for numbers after `####` (GSM8K),
and those for mathematics in `\boxed{}`.

`math_verify` (extra `math`) parses and compares mathematics, after `normalize_answer` has rewritten
what it misreads. If both texts are equal, nothing is parsed. Some texts make computer algebra
compute forever (`9^{9^{9}}`). On the main thread of a process an alarm ends such a comparison, and
the answer is wrong; on another thread there is no such protection.
"""

import logging
import re
import threading
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Literal

from agentrl.errors import MissingExtraError
from agentrl.plugins.environment import install_command

Method = Literal["strict", "flexible"]

TIMEOUT_S = 3
"""Seconds to parse one answer, and again to compare it."""
LONGEST_ANSWER = 1000
"""Characters of an answer; a longer one is wrong."""

_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\s+")
_SPACED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|\\[,! ]|~| )\d{3})+(?!\d)")
_COMMAS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_BRACKETS = re.compile(r"[()\[\]]|\\\{")
_SCIENTIFIC = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_PERCENT = re.compile(r"([+-]?[\d.]+)\s*(?:\\?%|\\text\{\s*percent\s*\}|percent)")
_MARKS = {
    "\u2212": "-",
    "\u2013": "-",
    "\ufe63": "-",
    "\uff05": "%",
    "\u00d7": r"\times ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
}
_BEFORE = re.compile(r"^(?:\\\$|\$|\\left|=|:)+|(?:\.|\\\$|\$)+$")


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


# Mathematics.


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}` or `\fbox{}`; None if there is none.

    Example:
        >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    for start in reversed([match.end() for match in _BOX.finditer(text)][-20:]):
        inside = _braced(text[start : start + LONGEST_ANSWER + 2])
        if inside is not None:
            inner = last_boxed(inside)
            return inside.strip() if inner is None else inner
    return None


def _braced(text: str) -> str | None:
    if not text.startswith("{"):
        return None
    depth = 0
    for i, character in enumerate(text):
        if text[i - 1 : i] == "\\":
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i]
    return None


def normalize_answer(answer: str) -> str:
    r"""Rewrite an answer so that `math_verify` reads it correctly.

    Otherwise it reads `10\,000` as 10 times 0, `1e3` as a product with Euler's number, and a
    percentage not at all.

    Example:
        >>> normalize_answer(r"\$10\,000.")
        '10000'
    """
    for mark, plain in _MARKS.items():
        answer = answer.replace(mark, plain)
    answer = _BEFORE.sub("", answer.strip()).strip()
    answer = _SPACED.sub(_join_thousands, answer)
    if not _BRACKETS.search(answer):  # in brackets a comma separates two numbers
        answer = _COMMAS.sub(_join_thousands, answer)
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", answer)


def _join_thousands(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match.group())


def is_same_answer(answer: str, truth: str) -> bool:
    r"""Whether two answers mean the same.

    A percentage equals its number and its fraction: `50\%` equals 50 and 0.5.

    Raises:
        MissingExtraError: If the texts differ and the extra `math` is not installed.
    """
    if len(answer) > LONGEST_ANSWER:
        return False
    answer, truth = normalize_answer(answer), normalize_answer(truth)
    if _bare(answer) == _bare(truth):
        return bool(_bare(answer))
    answers, truths = _readings(answer), _readings(truth)
    if len(answers) == len(truths):  # neither is a percentage, or both are
        return _verify(answers[0], truths[0])
    return any(_verify(one, other) for one in answers for other in truths)


def _readings(answer: str) -> list[str]:
    """List the meanings of an answer: a percentage means its number or its fraction."""
    percent = _PERCENT.fullmatch(answer)
    if percent is None:
        return [answer]
    return [percent.group(1), rf"\frac{{{percent.group(1)}}}{{100}}"]


def _bare(answer: str) -> str:
    """Remove what has no meaning, to compare answers as texts."""
    answer = re.sub(r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", "", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", answer)
    answer = _SPACES.sub("", re.sub(r"(?<=\d)\s+(?=\d)", "_", answer))
    return answer.casefold() if answer.isalpha() else answer


def parse_answers(text: str) -> list[Any]:
    """Parse the last expressions of a text: `math_verify`'s objects, and texts.

    Raises:
        MissingExtraError: If the extra `math` is not installed.
    """
    return _import().parse(text, parsing_timeout=_alarm_s())


def _verify(answer: str, truth: str) -> bool:
    math_verify, limit = _import(), _alarm_s()
    gold = _parse_truth(truth, limit)
    found = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=limit)
    # `x \le 5` and `(-\infty, 5]` are the same answer.
    same = math_verify.verify(
        list(gold), found, allow_set_relation_comp=True, timeout_seconds=limit
    )
    return bool(same)


@lru_cache(maxsize=4096)
def _parse_truth(truth: str, limit: int | None) -> tuple[Any, ...]:
    return tuple(_import().parse(rf"\boxed{{{truth}}}", parsing_timeout=limit))


def _alarm_s() -> int | None:
    # Only the main thread can set an alarm.
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def _import() -> Any:
    try:
        import math_verify  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise MissingExtraError(
            "scoring mathematics needs the package math-verify",
            install=install_command("math"),
        ) from None
    # It warns about every time-out, and about a missing alarm on a thread.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify
