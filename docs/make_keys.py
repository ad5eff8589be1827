"""Write docs/keys.md, the list of every run-file key: `python docs/make_keys.py`."""

import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.section import Section

PAGE = Path(__file__).resolve().parent / "keys.md"
HEAD = """# Run-file keys

Every key of a run file, with its type, its default and its meaning. This page is written by
`docs/make_keys.py` from the schema. `agentrl config check run.yaml` prints the values of one run.
A run file needs `data.train_files` and `model.path`; every other key has a default. Keys of a verl
run file are in [from_verl.md](from_verl.md), keys of a tool's `config` in [tools.md](tools.md).
"""


def type_words(annotation: Any) -> str:
    """Return a type as a reader of YAML names it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return type_words(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (UnionType, typing.Union):
        kinds = [type_words(kind) for kind in arguments if kind is not NoneType]
        return " or ".join(dict.fromkeys(kinds)) + (" or null" if NoneType in arguments else "")
    if origin in (list, tuple):
        return f"list of {type_words(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    words = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_words(field: FieldInfo) -> str:
    """Return a default as YAML writes it."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower() if value is not None else 'null'}`"
    if isinstance(value, str | Path):
        return f"`{value}`" if str(value) else '`""`'
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, also an optional one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def rows(section: type[Section], prefix: str) -> Iterator[str]:
    """Yield the table rows of a section, inner sections after the key that holds them."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        meaning = " ".join((field.description or (inner and inner.__doc__) or "").split())
        meaning = meaning.replace("|", "\\|")
        key = f"{prefix}.{name}"
        if inner is None or get_origin(field.annotation) in (list, tuple, dict):
            kind, default = type_words(field.annotation), default_words(field)
            yield f"| `{key}` | {kind} | {default} | {meaning} |"
        else:
            if field.default is None:
                yield f"| `{key}` | section or null | `null` | {meaning} |"
            yield from rows(inner, key)


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        section = inner_section(field.annotation)
        if section is None:
            kind, default = type_words(field.annotation), default_words(field)
            meaning = " ".join((field.description or "").split())
            lines = [f"| `{name}` | {kind} | {default} | {meaning} |"]
        else:
            lines = list(rows(section, name))
        if lines:
            table = "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |"])
            parts.append(f"## {name}\n\n{table}\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
