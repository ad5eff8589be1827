"""Read the `config` of a bundled interaction into a checked record."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.plugins.file import unknown_key

S = TypeVar("S", bound=Section)

_SHARED = ("name", "timeout_s")
"""Keys of every interaction, which agentrl itself reads."""


def read_settings(kind: type[S], config: Mapping[str, Any]) -> S:
    """Check the keys of an interaction's own.

    Raises:
        ConfigError: for the first that is wrong or unknown. What was found is not shown: it may be
            the key of a service.
    """
    own = {key: value for key, value in config.items() if key not in _SHARED}
    try:
        return kind.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [part for part in first["loc"] if isinstance(part, str)]
        parent, key = _section_at(kind, place[:-1]), "".join(place[-1:])
        if first["type"] == "extra_forbidden":
            where = ".".join(place[:-1])
            raise unknown_key(key, parent.model_fields, file=None, parent=where) from None
        told = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            told, key=".".join(place) or None, expected=_description(parent, key)
        ) from None


def _section_at(kind: type[BaseModel], place: list[str]) -> type[BaseModel]:
    """Find the section that holds a key: the one asked for, or one inside it."""
    for part in place:
        inner = kind.model_fields[part].annotation
        if not isinstance(inner, type) or not issubclass(inner, BaseModel):
            break
        kind = inner
    return kind


def _description(section: type[BaseModel], key: str) -> str | None:
    field = section.model_fields.get(key)
    return " ".join(field.description.split()) if field and field.description else None
