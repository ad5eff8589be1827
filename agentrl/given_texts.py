"""Keep the text of values that YAML reads as another type, for keys whose type is text.

YAML 1.1 reads `0123`, `1e5`, `on`, `12:30` and `20260101_1234` as numbers and truth values. Only
the schema knows which keys are text, so a refused value is replaced by its text, if that is
accepted. Numbers are read as people write them: `010` is ten, and `12:30` is a text.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

Loc = tuple[int | str, ...]
_LEADING_ZERO = re.compile(r"([-+]?)0[0_]*([0-7_]+)")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_ODD_KEY = re.compile(r"(?i)yes|no|on|off|true|false|[-+]?[0-9_]*(?:[_:][0-9_:.]*|(?<=^0)[0-9_]+)")
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
    """Quote values of a YAML text, all or those that YAML 1.1 reads as nobody means them."""
    try:
        tokens = list(yaml.scan(source))
    except yaml.YAMLError:  # the reader reports it
        return source
    for before, token in reversed([*zip([None, *tokens], tokens, strict=False)]):
        if not (isinstance(token, yaml.ScalarToken) and token.plain):
            continue
        start, end = token.start_mark.index, token.end_mark.index
        text, is_key = source[start:end], isinstance(before, yaml.KeyToken)
        if text not in _KEPT and "\n" not in text:
            source = source[:start] + _written(text, is_key, as_texts) + source[end:]
    return source


def _written(text: str, is_key: bool, as_texts: bool) -> str:
    if is_key:
        is_quoted = _ODD_KEY.fullmatch(text) is not None
    else:
        is_quoted = as_texts or _BASE_60.fullmatch(text) is not None
    if is_quoted:
        return "'" + text.replace("'", "''") + "'"
    return text if is_key else _LEADING_ZERO.sub(r"\1\2", text) if _is_octal(text) else text


def _is_octal(text: str) -> bool:
    return _LEADING_ZERO.fullmatch(text) is not None


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


def text_in(texts: DictConfig, loc: Loc) -> Any:
    """Return the text at a location of a tree that was read as texts; None if there is none."""
    try:
        found: Any = texts
        for part in loc:
            found = found[part]
        is_tree = isinstance(found, DictConfig | ListConfig)
        return OmegaConf.to_container(found, resolve=True) if is_tree else found
    except (OmegaConfBaseException, KeyError, IndexError, TypeError):
        return None


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
    if () in texts:
        return texts[()]
    below: dict[int | str, dict[Loc, Any]] = {}
    for loc, text in texts.items():
        below.setdefault(loc[0], {})[loc[1:]] = text
    if not below:
        return values
    changed: Any = dict(cast("Any", values)) if isinstance(values, Mapping) else list(values)
    for part, inner in below.items():
        changed[part] = _replaced(changed[part], inner)
    return changed
