r"""Score the answer of a mathematical problem in `\boxed{}`.

`math_verify` (extra `math`) parses and compares the answers, after `normalize_answer` has rewritten
what it misreads. If both texts are equal, nothing is parsed.

Some texts make computer algebra compute forever (`9^{9^{9}}`). So the managers run this scorer in
a process. There an alarm ends such a comparison, and the answer is wrong. If the alarm does not
work either, the process is killed. On a thread there is no such protection.
"""

import logging
import re
import threading
from functools import lru_cache
from typing import Any, cast

from agentrl.answers import Method, without_thought
from agentrl.errors import MissingExtraError, RewardError
from agentrl.plugins.environment import install_command
from agentrl.rewards.scoring import read_text

TIMEOUT_S = 3
"""Seconds to parse one answer, and again to compare it."""
LONGEST_ANSWER = 1000
"""Characters of an answer; a longer one is wrong."""
LONGEST_TAIL = 1000
"""Characters at the end of a solution in which `flexible` looks for an answer."""

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
        data_source: Not read.
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
    truths = [read_text(truth, expected="an answer, or a list of them") for truth in listed]
    if not truths:
        raise RewardError("the ground truth is an empty list", expected="an answer")
    said = without_thought(solution_str)
    answer = last_boxed(said)
    boxed = answer is not None
    if answer is None and method == "flexible":
        tail = said[-LONGEST_TAIL:].replace("**", "")
        found = _import().parse(tail, parsing_timeout=_alarm_s())
        texts = [part for part in found if isinstance(part, str)]
        answer = texts[-1] if texts else None
    right = answer is not None and any(is_same_answer(answer, truth) for truth in truths)
    earned = score if right else format_score if boxed else 0.0
    return {"score": earned, "acc": float(right), "answered": float(answer is not None)}


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
