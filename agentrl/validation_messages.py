"""Explain in plain words what pydantic, OmegaConf and PyYAML refused.

This module imports no schema of the run file, so that plug-ins can use it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import ErrorDetails

_UNSET = re.compile(r"Environment variable '(.+)' not found")
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
"""The expected value, by the first word of pydantic's error type."""
_BOUNDS = {
    "greater_than": ("gt", "a number greater than"),
    "greater_than_equal": ("ge", "a number of at least"),
    "less_than": ("lt", "a number less than"),
    "less_than_equal": ("le", "a number of at most"),
    "too_short": ("min_length", "a length of at least"),
    "too_long": ("max_length", "a length of at most"),
    "string_too_short": ("min_length", "a text of a length of at least"),
    "string_too_long": ("max_length", "a text of a length of at most"),
}


def describe_malformed(error: yaml.MarkedYAMLError, file: Path) -> str:
    """Describe what is wrong with a YAML file, with line and column."""
    reason = error.problem or error.context or ""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"malformed YAML: {reason}"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if mark.line < len(lines) and lines[mark.line][mark.column :].startswith("\t"):
        reason = "a tab, but YAML allows only spaces there"
    return f"malformed YAML in line {mark.line + 1}, column {mark.column + 1}: {reason}"


def describe_expected(details: ErrorDetails) -> str:
    """Describe the values that pydantic would have accepted."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        name, bound = _BOUNDS[kind]
        return f"{bound} {context[name]}"
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected'].replace(' or ', ', ')}"
    return _KINDS.get(kind.partition("_")[0]) or details["msg"]


def dotted(loc: Sequence[int | str], key: str = "") -> str:
    """Write pydantic's location below `key` as a dotted key.

    Example:
        >>> dotted(("tools", 0, "name"), "agent")
        'agent.tools[0].name'
    """
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return (key + "".join(steps)).removeprefix(".")


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """Find the section classes in a field's annotation (`X` or `X | None`)."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


class Unresolved(NamedTuple):
    """Why an interpolation cannot be resolved, and what would be right."""

    message: str
    expected: str


def describe_unresolved(error: OmegaConfBaseException) -> Unresolved:
    """Describe why an interpolation cannot be resolved; its key is the error's `full_key`."""
    message = str(error).partition("\n")[0] or type(error).__name__
    if unset := _UNSET.search(message):
        name = unset[1]
        return Unresolved(
            f"the environment variable {name} is not set",
            f"{name} in the environment, or a default: ${{oc.env:{name},DEFAULT}}",
        )
    return Unresolved(message, "a value, or an interpolation that resolves to one")
