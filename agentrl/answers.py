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
from fractions import Fraction
from functools import lru_cache
from numbers import Number
from typing import Any, Literal

from agentrl.errors import MissingExtraError, RewardError
from agentrl.messages import THOUGHTS
from agentrl.plugins.environment import install_command

Method = Literal["strict", "flexible"]

TIMEOUT_S = 3
"""Seconds to parse one answer, and again to compare it."""
LONGEST_ANSWER = 1000
"""Characters of an answer; a longer one is wrong."""


# Numbers. A sign, currency and marks of emphasis may be in front; `[^\S\n]` is a space of one line.
_MINUS = r"\-\u2010-\u2013\u2212\ufe63\uff0d"
_LEAD = (
    rf"((?:(?<![A-Za-z\d)\]}}])[+{_MINUS}]|(?:[*_`\"'\u2018\u201c(\[{{\u20ac\u00a3\u00a5\u20b9]"
    r"|\\?\$|\\[(\[]|<(?:b|em|strong|i|u)>|\\(?:boxed|fbox|text\w*|math\w+|left)\s*\{?)[^\S\n]*+){0,12}+)"
)
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\[,! ]|[ \u00a0\u2009\u202f])\d{3})+(?!\d)|\d+)"
_DECIMAL = (
    rf"((?:{_DIGITS}(?:\.\d+)?|(?<![\w.])\.\d+)(?:\s?(?:\\times|\\cdot|\u00d7)\s?10\^\{{?-?\d+\}}?"
    rf"|[eE][-+]?\d+|[^\S\n]?/[^\S\n]?\d+)?)"
)
# What may not follow a number: more of it, of an expression, of a range, of a list of numbers.
_END = (
    r"(?![\d\u00b2\u00b3\u00b9\u2070-\u209f]|['\u2019]\d|[^\S\n]*\u221a|[^\S\n]*[<>\u2264\u2265][^\S\n]+[\w(\\-]"
    r"|[ \t-]*(?:hundred|thousand|[mbtr]+illion|dozen"
    r"|and[^\S\n]+an?[^\S\n]+(?:half|third|quarter|fourth|fifth|sixth|eighth|tenth)\b)"
    r"|[.,:]\d|[\^_][A-Za-z\d{\\-]|\*{1,2}[-.]?\d|\(\w|[a-fi-kn-rt-zA-KM-Z\u03c0\u00bc-\u00be](?![A-Za-z])"
    r"|(?:pi|sqrt)(?![a-z])|[^\S\n]*\\(?:[dt]?frac|sqrt|pi|times|cdot|div|pm)(?![a-z])"
    r"|[*_`$)\]}%]*+[^\S\n]+\\?\$?\d"
    rf"|[*_`$)\]}}%]*+[^\S\n]*(?:[+*/^:,x\u00d7\u00f7\u00b7\u00b1{_MINUS}]|(?:[A-Za-z]+[^\S\n]+)?"
    r"\b(?:or|and|to)\b|(?:mod|times|plus|minus|over|divided by)"
    r"|(?:dollars?|feet|hours?|minutes?|pounds?|years?|days?|weeks?)\b)"
    r"[ \t\u00a0$(\\{*-]*\.?\d)"
)
_STRICT = re.compile(
    rf"####\s*+(?:(?:(?![A-Za-z]{{2}}|####)[^=\n]){{0,200}}=[^\S\n]*){{0,5}}{_LEAD}{_DECIMAL}{_END}"
)
_ANY = re.compile(rf"(?<!\d)(?<!\d[.,/:^])(?<!\b[A-Za-z])(?<![A-Za-z]_){_LEAD}{_DECIMAL}{_END}")
_OPERAND = re.compile(
    r"\d(?:\*\*?|[/+^x\u00d7\u00f7\u00b7(]|[^\S\n]?(?:\\times|\\cdot|\\div)[^\S\n]?"
    rf"|[^\S\n]+[*/+x\u00d7\u00f7\u00b7{_MINUS}][^\S\n]+)\Z"
)
_VALUE = re.compile(rf"\s*([+{_MINUS}]?(?:\\?\$)?[+{_MINUS}]?){_DECIMAL}\s*")

_LITERAL = re.compile(
    r"([-+]?(?:\d+\.?\d*|\.\d+))(?:\s*\\(?:cdot|times)\s*10\^\{?([-+]?\d{1,6})\}?)?"
)
_BASED = re.compile(
    r"\(?(?<![\w.])(\d+(?:\.\d+)?(?=\)?_)|[0-9A-F]+(?=\)?_\{?(?:1[1-9]|[23]\d)))\)?_\{?(\w+)\}?"
)
_BASE = re.compile(r"(?<=\w)\)?\s*(?:\(?in\s+)?base[\s-]*(\w+)\)?", re.IGNORECASE)
_BASE_NAMES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10",
}  # fmt: skip
_PROSE = re.compile(r"(?:[^\W\d_]|[\s,;<>=()\[\]'\u2019.-]|\\[{} ])+")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'\u2019.-]*[^\W\d_]+)+")
_NAMES = re.compile(r"(?<![\\A-Za-z])(?:[A-Z]{2,}|[A-Z]+\d[A-Z\d]*)(?![a-z])")
_ANGLE = re.compile(r"((?<!tri)angle\s*\{?)([A-Z]{3})(?![A-Za-z])")
_NOT_FINITE = {"nan", "NaN", "NAN", "inf", "-inf"}
_NO_NUMBER = re.compile(r"nan|inf", re.IGNORECASE)

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
_BEFORE = re.compile(r"^(?:\\\$|\$|\\left|=|:|\*\*|__|`)+|(?:\.|\\\$|\$|\*\*|__|`)+$")


def without_thought(text: str) -> str:
    """Return the text after the last thought. A thought without an end hides the rest.

    Example:
        >>> without_thought("<think>hm</think> Left.")
        'Left.'
    """
    for opening, closing in THOUGHTS.items():
        # The prompt may have the opening tag. A closing token without a slash ends other texts too.
        if "/" in closing or opening in text:
            text = text.rpartition(closing)[2].partition(opening)[0]
    return text.strip()


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
    found = (_STRICT if method == "strict" else _ANY).finditer(text)
    whole = [
        one for one in found if not _OPERAND.search(text, max(0, one.start(2) - 9), one.start(2))
    ]
    return _plain(whole[-1]) if whole else None


def same_number(left: str, right: str) -> bool:
    """Whether two texts are exactly the same number. A text that is not a number equals nothing.

    Example:
        >>> same_number("1,200", "1200.0")
        True
    """
    one, other = to_number(left), to_number(right)
    return one is not None and other is not None and one == other


def to_number(text: str) -> Decimal | Fraction | None:
    """Read a text that is a number: with sign, currency, separators, exponent, or a fraction.

    Returns:
        Its exact value; None if it is not a number.
    """
    found = _VALUE.fullmatch(text)
    numerator, slash, denominator = _plain(found).partition("/") if found else ("", "", "")
    try:
        if not slash:
            return Decimal(numerator)
        return Fraction(numerator) / int(denominator)
    except (InvalidOperation, ArithmeticError, ValueError):
        return None


def _plain(match: re.Match[str]) -> str:
    lead, number = match.groups()
    number = re.sub(r"\s?(?:\\times|\\cdot|\u00d7)\s?10\^", "e", number)
    sign = "-" if re.search(f"[{_MINUS}]", lead) else ""
    return sign + re.sub(r"[^\d./eE+-]", "", number)


# Ground truths.


def read_text(truth: Any, *, expected: str, data_source: str = "") -> str:
    """Return a ground truth that is a text or a number, as a text.

    What compares with a ground truth raises if it cannot, and scores 0 only if the answer is wrong.

    Args:
        truth: The row's ground truth.
        expected: What is accepted, for the error.
        data_source: The row's data source, for the error.

    Raises:
        RewardError: If it is anything else: null, a bool, a list, a mapping, an empty text, or a
            number that is not finite (also as a text: `nan`).
    """
    is_plain = not isinstance(truth, bool) and isinstance(truth, str | Number)
    text = str(truth).strip() if is_plain else ""
    is_number = not isinstance(truth, str)
    if not text or text in _NOT_FINITE or (is_number and _NO_NUMBER.search(text)):
        raise _refusal(truth, expected, data_source)
    return text


def read_number(truth: Any, *, data_source: str = "") -> str:
    """Return a ground truth that is a number, with or without `$` and commas, as a text.

    Raises:
        RewardError: If it is anything else.
    """
    text = read_text(truth, expected="a number", data_source=data_source)
    if to_number(text) is None:
        raise _refusal(truth, "a number", data_source)
    return text


def _refusal(truth: Any, expected: str, data_source: str) -> RewardError:
    row = f" in a row of the data source {data_source!r}" if data_source else ""
    return RewardError(f"the ground truth is {truth!r:.200}{row}", expected=expected)


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
    answer, truth = _name_texts(answer, truth)
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
    answer = _without_fonts(answer)
    answer = _SPACES.sub("", re.sub(r"(?<=\d)\s+(?=\d)", "_", answer))
    return answer.casefold() if answer.isalpha() else answer


def _without_fonts(answer: str) -> str:
    return re.sub(r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox)\s*\{([^{}]*)\}", r"\1", answer)


def _name_texts(answer: str, truth: str) -> tuple[str, str]:
    r"""Replace what is not arithmetic by symbols: words, names of points, and numbers in a base.

    Otherwise `math_verify` reads a word as a product of its letters, and does not read bases. A
    side is left as it is if the other one has no such text: `xy` is also `x \cdot y`. An angle may
    be read from either side: `\angle ABC` is `\angle CBA`.
    """
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        text = re.sub(r"[^\w.]", "", match.group()).casefold().lstrip("0")
        text = re.sub(r"(?<=_)[a-z]+\Z", lambda word: _BASE_NAMES.get(word[0], word[0]), text)
        return f"q_{{{names.setdefault(text, str(1000 + len(names)))}}}"

    both = [_BASE.sub(r"_{\1}", _without_fonts(one)) for one in (answer, truth)]
    if all(_BASED.search(one) for one in both):
        return _BASED.sub(name, both[0]), _BASED.sub(name, both[1])
    both = [re.sub(r"\s+(?:and|or)\s+", ", ", one) for one in both]
    if all(_PROSE.fullmatch(one) and _WORDS.search(one) for one in both):
        return _WORDS.sub(name, both[0]), _WORDS.sub(name, both[1])
    both = [_ANGLE.sub(lambda m: m[1] + min(m[2], m[2][::-1]), one) for one in both]
    if all(_NAMES.search(one) for one in both):
        return _NAMES.sub(name, both[0]), _NAMES.sub(name, both[1])
    return answer, truth


def parse_answers(text: str) -> list[Any]:
    """Parse the last expressions of a text: `math_verify`'s objects, and texts.

    Raises:
        MissingExtraError: If the extra `math` is not installed.
    """
    return _import().parse(text, parsing_timeout=_alarm_s())


def _verify(answer: str, truth: str) -> bool:
    math_verify, limit = _import(), _alarm_s()
    literals = [_LITERAL.fullmatch(one.strip()) for one in (answer, truth)]
    if None not in literals:
        one, other = (Decimal(f"{m[1]}e{m[2] or 0}") for m in literals if m is not None)
        return one == other
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
