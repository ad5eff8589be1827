"""Keep the text of values that YAML reads as another type, for keys whose type is text.

YAML 1.1 reads `0123`, `1e5`, `on`, `12:30` and `20260101_1234` as numbers and truth values. Only
the schema knows which keys are text, so a refused value is replaced by its text, if that is
accepted. Numbers are read as people write them: `010` is ten, and `12:30` is a text.
"""

import copy
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import ValidationError

Loc = tuple[int | str, ...]
_OCTAL = re.compile(r"^([-+]?)0[0_]*([0-7_]+)$")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_ODD_KEY = re.compile(r"(?i)yes|no|on|off|true|false|[0-9]*_[0-9_]*|0[0-9]+")
_KEPT = frozenset({"", "~", "null", "Null", "NULL", "<<", "="})
"""Plain scalars that are no values of a text key: nulls, and what YAML merges by."""


def load_yaml(file: Path, *, as_texts: bool = False, **options: Any) -> DictConfig | ListConfig:
    """Load a YAML file by OmegaConf, with numbers as people write them.

    Args:
        file: The file.
        as_texts: Make every value except null the text that the file has.
        **options: Of `OmegaConf.load`.
    """
    source = file.read_text(encoding="utf-8")
    written = rewrite(source, as_texts=as_texts)
    given = file if written == source else io.StringIO(written)
    return OmegaConf.load(given, **options)


def rewrite(source: str, *, as_texts: bool) -> str:
    """Quote all values of a YAML text, or those that YAML 1.1 reads as numbers to the base 60.

    Octal numbers become decimal. Values with a tag stay as they are.
    """
    try:
        tokens = list(yaml.scan(source))
    except yaml.YAMLError:  # the reader reports it
        return source
    for before, token in reversed([*zip([None, *tokens], tokens, strict=False)]):
        is_tagged = isinstance(before, yaml.TagToken)
        if isinstance(token, yaml.ScalarToken) and token.plain and not is_tagged:
            start, end = token.start_mark.index, token.end_mark.index
            text, is_key = source[start:end], isinstance(before, yaml.KeyToken)
            is_text = _ODD_KEY.fullmatch(text) is not None if is_key else as_texts
            source = source[:start] + _written(text, is_text) + source[end:]
    return source


def _written(text: str, is_text: bool) -> str:
    if text in _KEPT or "\n" in text:
        return text
    if is_text or _BASE_60.fullmatch(text):
        return "'" + text.replace("'", "''") + "'"
    return _OCTAL.sub(r"\1\2", text)


def with_texts(check: Callable[[Any], object], given: Any, text_at: Callable[[Loc], Any]) -> Any:
    """Return values with the given text of those that are refused, if the text is accepted.

    Args:
        check: Validates all values by pydantic.
        given: The values.
        text_at: Returns the text of a value, or the texts in it; None if there is none.
    """

    def refused(values: Any) -> set[Loc]:
        try:
            check(values)
        except ValidationError as error:
            return {_within(given, one["loc"]) for one in error.errors(include_url=False)}
        return set()

    texts = {loc: text for loc in refused(given) if loc and (text := text_at(loc)) is not None}
    if not texts:
        return given
    left = refused(_replaced(given, texts))
    return _replaced(given, {loc: text for loc, text in texts.items() if loc not in left})


def value_at(values: Any, loc: Sequence[int | str]) -> Any:
    """Return the value at a location; None if there is none."""
    for part in loc:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _within(values: Any, loc: Loc) -> Loc:
    """Shorten a location to a value that was given; pydantic adds the names of types."""
    while loc and value_at(values, loc) is None:
        loc = loc[:-1]
    return loc


def _replaced(values: Any, texts: Mapping[Loc, Any]) -> Any:
    values = copy.deepcopy(values)
    for loc, text in texts.items():
        value_at(values, loc[:-1])[loc[-1]] = text
    return values
