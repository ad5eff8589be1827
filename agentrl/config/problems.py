"""What is wrong with a run file, in words: one record and one line for each problem."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Never

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of names to values",
    "model": "a section, that is a mapping of keys to values",
    "finite": "a finite number",
}
"""What pydantic's error types ask for, by their first word."""

_BOUNDS = {
    "greater_than": ("gt", "a number greater than"),
    "greater_than_equal": ("ge", "a number of at least"),
    "less_than": ("lt", "a number less than"),
    "less_than_equal": ("le", "a number of at most"),
}


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a configuration from meaning anything."""

    key: str
    """Dotted, as on the command line; empty for the file as a whole."""
    message: str
    """What is wrong, with the offending value."""
    expected: str | None = None
    """What would have been right."""

    def __str__(self) -> str:
        told = f"{self.key}: {self.message}" if self.key else self.message
        return f"{told} (expected {self.expected})" if self.expected else told


def raise_problems(problems: Sequence[Problem], file: str | Path | None) -> Never:
    """Raise all problems as one error, a line for each.

    Raises:
        ConfigError: always.
    """
    if len(problems) == 1:
        only = problems[0]
        told = only.message if only.key in only.message else f"{only.key}: {only.message}"
        raise ConfigError(told, file=file, key=only.key or None, expected=only.expected)
    lines = [f"{len(problems)} problems in the configuration", *(f"- {p}" for p in problems)]
    raise ConfigError("\n".join(lines), file=file)


def problems_of(error: ValidationError, overridden: Iterable[str] = ()) -> list[Problem]:
    """Translate what pydantic refused into plain sentences.

    Args:
        error: From validating a `RunConfig`.
        overridden: Dotted keys that were given on the command line, to say so.
    """
    problems = [_problem(details) for details in error.errors()]
    given = tuple(overridden)
    return [told_where(problem, given) for problem in problems]


def nearest_key(key: str, known: Sequence[str] | None = None) -> str | None:
    """Find the known key that an unknown one was most likely meant to be.

    Args:
        key: Dotted.
        known: What there is, outer keys first; None: `known_keys`.
    """
    there = known_keys() if known is None else known
    section, _, leaf = key.rpartition(".")
    leaves = {other.rpartition(".")[2]: other for other in reversed(there)}
    if leaf in leaves:
        return leaves[leaf]
    beside = [k.rpartition(".")[2] for k in there if k.rpartition(".")[0] == section]
    if found := difflib.get_close_matches(leaf, beside, n=1, cutoff=0.6):
        return f"{section}.{found[0]}".removeprefix(".")
    if found := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return leaves[found[0]]
    return None


@cache
def known_keys() -> tuple[str, ...]:
    """List every key of a run file, sections and leaves, dotted, outer ones first."""
    return tuple(sorted(_keys_under(RunConfig, ""), key=lambda key: key.count(".")))


def _keys_under(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in section_types(field.annotation):
            yield from _keys_under(inner, f"{prefix}{name}.")


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """Find the section classes in a field's annotation (`X` or `X | None`)."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


def _problem(details: ErrorDetails) -> Problem:
    key = _dotted(details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        nearest = nearest_key(key)
        meant = f"; did you mean {nearest!r}?" if nearest else ""
        return Problem(key, f"unknown key {key!r}{meant}")
    if kind == "missing":
        return Problem(key, "is missing, and there is no default", "a value")
    return Problem(key, f"{_shown(value)} is not allowed here", _expected(kind, context, details))


def _expected(kind: str, context: Mapping[str, Any], details: ErrorDetails) -> str:
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "literal_error":
        return f"one of {context['expected'].replace(' or ', ', ')}"
    if kind in ("too_long", "too_short"):
        return f"{context.get('max_length', context.get('min_length'))} entries"
    return _KINDS.get(kind.partition("_")[0]) or details["msg"]


def told_where(problem: Problem, overridden: Sequence[str]) -> Problem:
    """Say of a problem that its key was given on the command line, where it was."""
    if any(
        problem.key == key or problem.key.startswith((f"{key}.", f"{key}[")) for key in overridden
    ):
        return replace(problem, message=f"{problem.message} (given on the command line)")
    return problem


def _dotted(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
