"""What pydantic refused, in plain words. Loads no schema of the run file: plug-ins need none."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

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
