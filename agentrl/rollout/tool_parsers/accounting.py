"""Check that the text of a call is fully accounted for by the call that was read from it.

A reader that drops a part of a call, or shortens an argument, would have the rollout execute what
the policy did not write. So every executed value must be in the text, and nothing but the format's
own signs may be left over.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentrl.rollout.tool_parsers.base import Call

_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
_CLOSING = re.compile(r"</([^<>\s]+)>")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FORMAT_WORD = re.compile(
    r"\b(?:name|arguments|parameters|parameter|functions?|type|id|call|tool_calls?|json|string|to"
    r"|null|None|index|commentary|analysis|assistant|constrain|code)\b[._]?"
)
"""Words that formats write around names and values."""
_SIGNS = re.compile(r"[\s{}\[\]\"',:;=()`/|<>\\-]+")


def find_unread(text: str, calls: Sequence[Call]) -> str:
    """Return why calls do not account for their text; empty if they do.

    Args:
        text: From the start of the first call to the end of the last one.
        calls: What was read from it.
    """
    leaves = [leaf for call in calls for leaf in _leaves(call.arguments)]
    names = {call.name for call in calls}
    texts = sorted((leaf for leaf in leaves if isinstance(leaf, str)), key=len, reverse=True)
    left = text
    for name in names:  # an id with the index of the call
        left = re.sub(rf"(?<!\w){re.escape(name)}:\d+\b", " ", left)
    for value in (value for value in texts if '"' in value):
        left = _without_word(left, _written(value, left))
    left, found_texts = _without_json_texts(left, {*names, *texts}, [c.arguments for c in calls])
    for value in (value for value in texts if not _SIGNS.fullmatch(value)):
        found = _written(value, left)
        if found is None and value not in found_texts and _written(value, text) is None:
            return f"its argument {value[:40]!r} is not in its text"
        left = _without_word(left, found)
    for name in set(_CLOSING.findall(left)):
        if left.count(f"</{name}>") > left.count(f"<{name}") > 0:
            return f"it has more {f'</{name}>'!r} than starts of such a part"
    left = _TAG.sub(" ", left)
    for word in {*names, *(str(leaf) for leaf in leaves if isinstance(leaf, bool))}:
        left = _without_word(_without_word(left, word), word.lower())
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    left = _NUMBER.sub(lambda match: " " if _is_read(match[0], numbers) else match[0], left)
    left = _SIGNS.sub(" ", _FORMAT_WORD.sub(" ", left)).strip()
    return f"a part of its text was not read: {left[:40]!r}" if left else ""


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys, texts, numbers and constants of arguments, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _leaves(inner)
    else:
        yield value


def _without_json_texts(
    text: str, known: set[str], arguments: Sequence[Any]
) -> tuple[str, set[str]]:
    """Remove the JSON strings of which the value was read; also return these values."""
    found: set[str] = set()

    def is_read(match: re.Match[str]) -> bool:
        try:
            value = json.loads(match[0], strict=False)
        except ValueError:
            return False
        if value in known:
            found.add(value)
            return True
        try:
            is_object = json.loads(value) in arguments  # arguments as the text of an object
        except ValueError:
            return False
        found.update(known if is_object else ())
        return is_object

    return _JSON_TEXT.sub(lambda match: " " if is_read(match) else match[0], text), found


def _written(value: str, text: str) -> str | None:
    """Return the form in which a text writes a value; None if it does not."""
    ascii_form, form = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    forms = value, value.strip(), form, ascii_form, repr(value)[1:-1], html.escape(value)
    return next((form for form in forms if form in text), None)


def _without_word(text: str, word: str | None) -> str:
    """Remove a text where it is not a part of a word."""
    if not word:
        return text
    before = r"(?<!\w)" if word[:1].isalnum() else ""
    after = r"(?!\w)" if word[-1:].isalnum() else ""
    return re.sub(f"{before}{re.escape(word)}{after}", " ", text)


def _is_read(written: str, numbers: Sequence[float]) -> bool:
    """Whether a written number is one of those that were read; an integer is so exactly."""
    is_whole = len(written) < 400 and written.lstrip("+-").isdigit()
    value = int(written) if is_whole else float(written)
    return any(value == number for number in numbers)
