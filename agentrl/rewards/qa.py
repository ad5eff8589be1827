"""Score a short answer to a question: exact match and F1, after the normalization of SQuAD.

Source: Rajpurkar et al. 2016 (arXiv 1606.05250), section 6.1 (both measures). The answer between
`<answer>` and `</answer>` is the convention of Search-R1 (arXiv 2503.09516).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, cast

from agentrl.answers import read_text, without_thought
from agentrl.errors import RewardError

LONGEST_ANSWER = 2000
"""Characters of an answer that are read."""

_ANSWERS = "an answer, a list of them, or a mapping with them under `target`"
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_QUOTES = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u00b4": "'",
        "\u2013": "-",
        "\u2014": "-",
    }
)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    metric: Literal["em", "f1", "contains"] = "em",
    require_tags: bool = True,
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Compare a solution's answer with the golden answers; the best match counts.

    Args:
        data_source: Named in errors.
        solution_str: The solution; thoughts are not read.
        ground_truth: A golden answer, a list of them, or a mapping with them under `target`.
        extra_info: Not read.
        metric: `em`: the same words in the same order; `f1`: the share of common words;
            `contains`: the answer contains a golden answer.
        require_tags: Whether the answer must be in `<answer>` (the last one counts). If not, a
            solution without tags is its own answer.
        score: Score of the best possible answer.
        format_score: Smallest score of an answer that could be read.

    Returns:
        `score`, `acc` (1.0 for an exact match), `em`, `f1`, `answered` (1.0 if one was given).

    Raises:
        RewardError: If the ground truth contains no answer.
    """
    golden = _golden(ground_truth, data_source)
    answer = find_answer(without_thought(solution_str), require_tags=require_tags)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "em": 0.0, "f1": 0.0, "answered": 0.0}
    em = max(float(is_same(answer, one)) for one in golden)
    f1 = max(compute_f1(answer, one) for one in golden)
    given = f" {normalize(answer)} "
    contains = any(f" {one} " in given for one in map(normalize, golden) if one)
    found = {"em": em, "f1": f1, "contains": float(contains)}
    earned = max(score * found[metric], format_score)
    return {"score": earned, "acc": em, "em": em, "f1": f1, "answered": 1.0}


def find_answer(solution: str, *, require_tags: bool = True) -> str | None:
    """Return the answer in a solution; None if there is none.

    Example:
        >>> find_answer("<answer>Rome</answer> no: <answer> Paris </answer>")
        'Paris'
    """
    tagged = _TAG.findall(solution)
    if tagged:
        return str(tagged[-1]).strip()[:LONGEST_ANSWER]
    return None if require_tags else solution.strip()[-LONGEST_ANSWER:]


def normalize(text: str) -> str:
    """Lower the case and remove punctuation, articles and extra white space.

    Example:
        >>> normalize("The  Eiffel Tower.")
        'eiffel tower'
    """
    plain = text.translate(_QUOTES).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_same(answer: str, golden: str) -> bool:
    """Return whether two answers are equal, normalized."""
    # Normalizing "The The" leaves nothing, as for an empty answer.
    if normalize(golden):
        return normalize(answer) == normalize(golden)
    return answer.casefold().split() == golden.casefold().split()


def compute_f1(answer: str, golden: str) -> float:
    """Compute the harmonic mean of precision and recall over the words of two answers.

    "yes", "no" and "no answer" match only themselves.

    Example:
        >>> compute_f1("Barack Obama", "Barack Hussein Obama")
        0.8
    """
    ours, theirs = normalize(answer), normalize(golden)
    if is_same(answer, golden):
        return 1.0
    if {ours, theirs} & {"yes", "no", "noanswer"}:
        return 0.0
    left, right = ours.split(), theirs.split()
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def _golden(ground_truth: Any, data_source: str) -> list[str]:
    found = ground_truth
    if isinstance(found, dict):
        found = cast("dict[str, Any]", found).get("target")
    if hasattr(found, "tolist"):  # an array from a Parquet file
        found = cast("Any", found).tolist()
    many = isinstance(found, Sequence) and not isinstance(found, str)
    listed = list(cast("Sequence[Any]", found if many else [found]))
    if not listed:
        raise RewardError(f"the ground truth is {ground_truth!r:.200}", expected=_ANSWERS)
    return [read_text(one, expected=_ANSWERS, data_source=data_source) for one in listed]
