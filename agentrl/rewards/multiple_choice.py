r"""Score the answer to a question with lettered options.

The letter is searched in these forms, in this order: the last `\boxed{}`, `<answer>`, the text
after "answer is" or "answer:", and a last line that is only an option. A letter inside an argument
("(A) is wrong") does not count. If one form occurs several times, the last one counts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl.answers import last_boxed, read_text, without_thought
from agentrl.errors import RewardError

LONGEST_TAIL = 2000
"""Characters at the end of a solution that are read."""

_RIGHT = "a letter, the index of an option, or its text"
_TAG = re.compile(r"<answer>(.*?)</answer>", re.I | re.S)
_SAYS = (
    r"(?:answer|choice|option|solution)(?:\s+(?:choice|option|letter))?\s*"
    r"(?:is|:|=|would be|must be)"
)
# Each match ends before the next answer: "The answer is A. No, the answer is B." gives two.
_SAID = re.compile(rf"{_SAYS}\s*:?\s*((?:(?!{_SAYS})[^\n]){{1,200}})", re.I)
_MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|boxed)\b|[*_$`{}]|\\[()\[\]]")
_LETTER = re.compile(
    r"^\W*(?:(?i:option|choice|answer)\s*:?\s*)?"
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?=$|\s*[).:,;\]]|\s+[-\u2013\u2014]|\s*$)|([a-z])(?=\s*$|[).]\s))"
)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    r"""Compare the option that a solution chooses with the right one.

    Args:
        data_source: Named in errors.
        solution_str: The solution; thoughts are not read.
        ground_truth: The right letter ("B", "(B)"), the option's index (0 is A), or its text.
        extra_info: `options` (or `choices`) is read: the texts of the options in order, or a
            mapping of letters to texts. With them, an answer may also be an option's text.
        score: Score of the right option.
        format_score: Score of a wrong option.

    Returns:
        `score`, `acc` (1.0 if the option is right), `answered` (1.0 if one could be read).

    Raises:
        RewardError: If the ground truth is neither a letter nor an option.
    """
    options = _options(extra_info or {})
    truth = _truth(ground_truth, options, data_source)
    chosen = find_choice(without_thought(solution_str), options)
    right = chosen == truth
    earned = score if right else format_score if chosen is not None else 0.0
    return {"score": earned, "acc": float(right), "answered": float(chosen is not None)}


def find_choice(solution: str, options: Mapping[str, str] | None = None) -> str | None:
    """Return the letter that a solution gives as its answer; None if there is none.

    Args:
        solution: A text.
        options: The options' texts by letter. Other letters do not count then.

    Example:
        >>> find_choice("(A) is too small. The answer is (B).")
        'B'
    """
    tail = solution[-LONGEST_TAIL:]
    boxed = last_boxed(tail)
    lines = tail.strip().splitlines()
    answers: list[str] = [  # in order of preference
        *([boxed] if boxed is not None else []),
        *_TAG.findall(tail)[-1:],
        *reversed(_SAID.findall(tail)),
        *lines[-1:],
    ]
    for given in answers:
        chosen = _read_choice(given, options or {})
        if chosen is not None:
            return chosen
    return None


def _read_choice(given: str, options: Mapping[str, str]) -> str | None:
    plain = _MARKUP.sub(" ", given).strip()
    by_text = [letter for letter, text in options.items() if _same_text(plain, text)]
    if len(by_text) == 1:
        return by_text[0]
    found = _LETTER.match(plain)
    if found is None:
        return None
    letter = next(group for group in found.groups() if group).upper()
    return letter if not options or letter in options else None


def _same_text(left: str, right: str) -> bool:
    return _words(left) == _words(right) != ""


def _words(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).casefold().split()).rstrip(".")


def _options(extra_info: Mapping[str, Any]) -> dict[str, str]:
    found = extra_info.get("options", extra_info.get("choices"))
    if isinstance(found, Mapping):
        named = cast("Mapping[Any, Any]", found)
        if "text" in named and "label" in named:  # as ARC writes them
            return dict(zip(map(str, named["label"]), map(str, named["text"]), strict=True))
        return {str(letter).upper(): str(text) for letter, text in named.items()}
    if isinstance(found, Sequence) and not isinstance(found, str):
        texts = cast("Sequence[Any]", found)
        return {_letter(index): str(text) for index, text in enumerate(texts)}
    return {}


def _truth(ground_truth: Any, options: Mapping[str, str], data_source: str) -> str:
    text = read_text(ground_truth, expected=_RIGHT, data_source=data_source)
    if isinstance(ground_truth, int) and 0 <= ground_truth < 26:
        return _letter(ground_truth)
    letter = text.strip("().").upper()
    if len(letter) == 1 and letter.isalpha():
        return letter
    matching = [letter for letter, option in options.items() if _same_text(text, option)]
    if len(matching) != 1:
        raise RewardError(f"the ground truth is {ground_truth!r:.200}", expected=_RIGHT)
    return matching[0]


def _letter(index: int) -> str:
    return chr(ord("A") + index)
