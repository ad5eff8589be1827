"""What pydantic and OmegaConf refused, in plain words.

Loads no schema of the run file: plug-ins need none.
"""

import re
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
"""What pydantic's error types ask for, by their first word."""

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


def malformed(error: yaml.MarkedYAMLError, file: Path) -> str:
    """Say what is wrong with a YAML file, and where."""
    told = error.problem or error.context or ""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"malformed YAML: {told}"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if mark.line < len(lines) and lines[mark.line][mark.column :].startswith("\t"):
        told = "a tab, where YAML allows only spaces"
    return f"malformed YAML in line {mark.line + 1}, column {mark.column + 1}: {told}"


def what_was_expected(details: ErrorDetails) -> str:
    """Say in plain words what pydantic would have taken in the place of what it refused."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected'].replace(' or ', ', ')}"
    return _KINDS.get(kind.partition("_")[0]) or details["msg"]


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """Find the section classes in a field's annotation (`X` or `X | None`)."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]


class Unresolved(NamedTuple):
    """What is wrong with an interpolation, and what would have been right."""

    told: str
    expected: str


def unresolved(error: OmegaConfBaseException) -> Unresolved:
    """Say why an interpolation of a YAML leads nowhere; its key is the error's `full_key`."""
    told = str(error).partition("\n")[0] or type(error).__name__
    if unset := _UNSET.search(told):
        name = unset[1]
        return Unresolved(
            f"the environment variable {name} is not set",
            f"{name} in the environment, or a default: ${{oc.env:{name},DEFAULT}}",
        )
    return Unresolved(told, "a value, or an interpolation that leads to one")
