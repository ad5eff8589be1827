"""What is wrong with a run file: one record and one line of a message for each problem."""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Never, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.other_names import find_meant, find_refusal, table
from agentrl.config.schema.run import RunConfig
from agentrl.errors import AgentRLError, ConfigError, find_nearest
from agentrl.validation_messages import describe_expected, dotted, section_types

_ANYWHERE = ("name", "url", "path", "type", "enable")
"""Names that mean something only together with their section."""
_SECOND = ("critic", "prepare")
"""Sections that are meant only if the unknown key names them."""
_INDEX = re.compile(r"\[\d+\]")
ON_COMMAND_LINE = "(given on the command line)"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted, as on the command line; empty for the file as a whole."""
    reason: str
    """What is wrong, with the offending value."""
    expected: str | None = None
    """What would be right."""
    is_overridden: bool = False
    """Whether the key was given on the command line."""
    is_unknown: bool = False
    """Whether no such key exists; if it is a section, all in it is unknown."""

    @property
    def message(self) -> str:
        """The key and what is wrong, and its origin if that is not the file."""
        message = f"{self.key}: {self.reason}" if self.key else self.reason
        return f"{message} {ON_COMMAND_LINE}" if self.is_overridden else message

    def __str__(self) -> str:
        return f"{self.message} (expected {self.expected})" if self.expected else self.message


def raise_problems(problems: Sequence[Problem], file: str | Path | None) -> Never:
    """Raise all problems as one error, a line for each.

    Raises:
        ConfigError: always; it names the file unless all of them are the command line's.
    """
    origin = None if all(problem.is_overridden for problem in problems) else file
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.message, file=origin, key=only.key or None, expected=only.expected)
    lines = [f"{len(problems)} problems in the configuration", *(f"- {p}" for p in problems)]
    raise ConfigError("\n".join(lines), file=origin)


@contextmanager
def naming_file(file: str | Path | None) -> Generator[None]:
    """Add the file to an error of the `with` block that names none."""
    try:
        yield
    except AgentRLError as error:
        if file is not None:
            error.details.setdefault("file", file)
        raise


def problems_of(error: ValidationError, overridden: Sequence[str] = ()) -> list[Problem]:
    """Translate what pydantic refused into plain sentences.

    Args:
        error: From validating a `RunConfig`.
        overridden: Dotted keys that were given on the command line; their messages say so.
    """
    return [
        mark_overridden(problem, overridden)
        for details in error.errors()
        for problem in _problems(details)
    ]


def mark_overridden(problem: Problem, overridden: Sequence[str]) -> Problem:
    """Mark a problem if its key was given on the command line."""
    is_above = problem.is_unknown and any(is_under(key, [problem.key]) for key in overridden)
    return replace(problem, is_overridden=is_above or is_under(problem.key, overridden))


def unknown_key(key: str, known: Sequence[str] | None = None) -> str:
    """Write the message for an unknown key, with the nearest known one; see `nearest_key`."""
    if why := find_refusal(key):
        return f"unknown key: {why}"
    nearest = nearest_key(key, known)
    return "unknown key" + (f"; did you mean {nearest!r}?" if nearest else "")


def nearest_key(key: str, known: Sequence[str] | None = None) -> str | None:
    """Find the known key that an unknown one was most likely meant to be.

    Args:
        key: Dotted.
        known: The keys that exist, outer keys first; None: `known_keys`.
    """
    existing = known_keys() if known is None else known
    section, _, leaf = key.rpartition(".")
    is_section = any(other.startswith(f"{section}.") for other in existing)
    if meant := find_meant(key) or (None if is_section else find_meant(section)):
        return meant
    elsewhere = [k for k in existing if "prepare" in section or not k.startswith("prepare.")]
    if same := [other for other in elsewhere if other.rpartition(".")[2] == leaf]:
        return _closest(section, same)
    leaves = {other.rpartition(".")[2]: other for other in reversed(elsewhere)}
    listed = _INDEX.sub("", section)  # all items of a list have the same keys
    siblings = [k.rpartition(".")[2] for k in existing if k.rpartition(".")[0] == listed]
    likely = find_nearest(leaf, siblings, cutoff=0.8) or _find_same_words(leaf, siblings)
    if found := likely or find_nearest(leaf, siblings):
        return f"{section}.{found}".removeprefix(".")
    other_name = find_nearest(leaf, list(table()["meant"]), cutoff=0.85)
    found = find_nearest(leaf, leaves, cutoff=0.75)
    return leaves[found] if found else find_meant(other_name or "")


def _find_same_words(name: str, known: Sequence[str]) -> str | None:
    """Return the shortest known name that contains a word similar to each word of `name`.

    None for a name of one word.
    """
    words = name.split("_")
    fitting = (
        one for one in known if all(find_nearest(w, one.split("_"), cutoff=0.8) for w in words)
    )
    return min(fitting, key=len, default=None) if len(words) > 1 else None


def _closest(section: str, keys: Sequence[str]) -> str | None:
    """Choose, among keys of one name, the key with the sections most like the unknown key's."""
    given = set(section.split("."))

    def likeness(key: str) -> tuple[int, int, bool]:
        sections = set(key.split(".")[:-1])
        is_first = sections.isdisjoint(_SECOND)
        return len(sections & given), -len(sections - given), is_first

    best = max(keys, key=likeness)
    is_specific = best.rpartition(".")[2] not in _ANYWHERE or not section
    return best if is_specific or likeness(best)[0] else None


@cache
def known_keys() -> tuple[str, ...]:
    """List every key of a run file, sections and leaves, dotted, outer ones first."""
    return tuple(sorted(_keys_under(RunConfig, ""), key=lambda key: key.count(".")))


def _keys_under(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in section_types(field.annotation):
            yield from _keys_under(inner, f"{prefix}{name}.")


def _problems(details: ErrorDetails) -> Iterator[Problem]:
    """Describe an error; of an unknown section, the keys in it if one of them is well known."""
    key, value = dotted(details["loc"]), details["input"]
    inner = list(_leaves(key, value)) if details["type"] == "extra_forbidden" else []
    if any(find_refusal(leaf) or find_meant(leaf) for leaf in inner):
        yield from (Problem(leaf, unknown_key(leaf), is_unknown=True) for leaf in inner)
    else:
        yield _problem(details)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast("Mapping[Any, Any]", value).items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _problem(details: ErrorDetails) -> Problem:
    key = dotted(details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(key, unknown_key(key), is_unknown=True)
    if kind == "missing":
        return Problem(key, "is missing, and has no default", "a value")
    if kind == "value_error":
        return Problem(key, str(context["error"]))
    text = "null" if value is None else repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return Problem(key, f"{text} is not allowed here", describe_expected(details))


def is_under(key: str, others: Iterable[str]) -> bool:
    """Whether a dotted key is one of others, or below one."""
    return any(key == other or key.startswith((f"{other}.", f"{other}[")) for other in others)
