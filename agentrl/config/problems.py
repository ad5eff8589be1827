"""What is wrong with a run file, in words: one record and one line for each problem."""

import difflib
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Never

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.schema.run import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.validation_messages import section_types, what_was_expected

_OTHER_NAMES = {
    "max_new_tokens": "rollout.multi_turn.max_tokens_per_turn",
    "stop_tokens": "rollout.stop",
    "cliprange": "actor.clip_ratio",
}
"""Names that other libraries have for keys of ours."""
_ANYWHERE = ("name", "url", "path", "type", "enable")
"""Names that say nothing of what is meant without the section around them."""
_PLACE = re.compile(r"\[\d+\]")
_ALL_WEIGHTS = "agentrl trains all weights of the policy, and has no LoRA"
NOT_HERE = {
    f"model.{name}": _ALL_WEIGHTS
    for name in ("lora_rank", "lora_alpha", "lora_adapter_path", "target_modules")
}
"""Keys that users look for, and why there are none."""
ON_COMMAND_LINE = "(given on the command line)"


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a configuration from meaning anything."""

    key: str
    """Dotted, as on the command line; empty for the file as a whole."""
    message: str
    """What is wrong, with the offending value."""
    expected: str | None = None
    """What would have been right."""
    is_overridden: bool = False
    """Whether the key was given on the command line."""
    is_unknown: bool = False
    """Whether nothing has this key; if it is a section, all in it was given to no effect."""

    @property
    def told(self) -> str:
        """The key and the message, and the place where it is not the file."""
        told = f"{self.key}: {self.message}" if self.key else self.message
        return f"{told} {ON_COMMAND_LINE}" if self.is_overridden else told

    def __str__(self) -> str:
        return f"{self.told} (expected {self.expected})" if self.expected else self.told


def raise_problems(problems: Sequence[Problem], file: str | Path | None) -> Never:
    """Raise all problems as one error, a line for each.

    Raises:
        ConfigError: always; it names the file unless all of them are the command line's.
    """
    place = None if all(problem.is_overridden for problem in problems) else file
    if len(problems) == 1:
        only = problems[0]
        raise ConfigError(only.told, file=place, key=only.key or None, expected=only.expected)
    lines = [f"{len(problems)} problems in the configuration", *(f"- {p}" for p in problems)]
    raise ConfigError("\n".join(lines), file=place)


@contextmanager
def naming_file(file: str | Path | None) -> Generator[None]:
    """Add the file to an error of the `with` block that names none."""
    try:
        yield
    except AgentRLError as error:
        if file is not None:
            error.details.setdefault("file", file)
        raise


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
    if meant := _OTHER_NAMES.get(leaf):
        return meant
    if same := [other for other in there if other.rpartition(".")[2] == leaf]:
        return _closest(section, same)
    leaves = {other.rpartition(".")[2]: other for other in reversed(there)}
    listed = _PLACE.sub("", section)  # all items of a list have the same keys
    beside = [k.rpartition(".")[2] for k in there if k.rpartition(".")[0] == listed]
    if found := difflib.get_close_matches(leaf, beside, n=1, cutoff=0.6):
        return f"{section}.{found[0]}".removeprefix(".")
    if found := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return leaves[found[0]]
    return None


def _closest(section: str, keys: Sequence[str]) -> str | None:
    """Choose among keys of one name the one whose sections are most like the unknown key's."""
    given = set(section.split("."))

    def likeness(key: str) -> tuple[int, int]:
        sections = set(key.split(".")[:-1])
        return len(sections & given), -len(sections - given)

    best = max(keys, key=likeness)
    is_telling = best.rpartition(".")[2] not in _ANYWHERE or not section
    return best if is_telling or likeness(best)[0] else None


@cache
def known_keys() -> tuple[str, ...]:
    """List every key of a run file, sections and leaves, dotted, outer ones first."""
    return tuple(sorted(_keys_under(RunConfig, ""), key=lambda key: key.count(".")))


def _keys_under(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in section_types(field.annotation):
            yield from _keys_under(inner, f"{prefix}{name}.")


def _problem(details: ErrorDetails) -> Problem:
    key = _dotted(details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        if key in NOT_HERE:
            return Problem(key, f"unknown key: {NOT_HERE[key]}")
        nearest = nearest_key(key)
        meant = f"; did you mean {nearest!r}?" if nearest else ""
        return Problem(key, f"unknown key{meant}", is_unknown=True)
    if kind == "missing":
        return Problem(key, "is missing, and there is no default", "a value")
    if kind == "value_error":
        return Problem(key, str(context["error"]))
    return Problem(key, f"{_shown(value)} is not allowed here", what_was_expected(details))


def told_where(problem: Problem, overridden: Sequence[str]) -> Problem:
    """Say of a problem that its key was given on the command line, where it was."""
    above = problem.is_unknown and any(is_under(key, [problem.key]) for key in overridden)
    return replace(problem, is_overridden=above or is_under(problem.key, overridden))


def is_under(key: str, others: Iterable[str]) -> bool:
    """Whether a dotted key is one of others, or below one."""
    return any(key == other or key.startswith((f"{other}.", f"{other}[")) for other in others)


def _dotted(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
