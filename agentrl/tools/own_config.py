"""Read the keys of a bundled tool's `config`, and name every mistake in it.

A bundled tool knows its keys: what is neither its own nor one that agentrl reads of every tool is
an error that names the nearest key.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from agentrl.config.section import Section
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.plugins.file import unknown_key
from agentrl.tools.instance import ToolSettings
from agentrl.tools.lanes import Isolation

Keys = TypeVar("Keys", bound=Section)


def read_own_config(model: type[Keys], config: Mapping[str, Any]) -> Keys:
    """Read a tool's own keys out of its `config`.

    Raises:
        ConfigError: for a key that nobody reads, or a value that cannot be meant.
    """
    shared = {"type", *ToolSettings.model_fields}
    own = {key: value for key, value in config.items() if key not in shared}
    return read_keys(model, own, key="config", also_known=shared)


def read_keys(
    model: type[Keys],
    values: Mapping[str, Any],
    *,
    file: str | Path | None = None,
    key: str,
    also_known: set[str] = frozenset(),  # pyright: ignore[reportArgumentType]
) -> Keys:
    """Check a mapping against `model`.

    Args:
        model: The keys that are read.
        values: What the user wrote.
        file: Where it stands, for the error.
        key: Under which key, for the error.
        also_known: Keys that are read elsewhere: named beside the model's own.

    Raises:
        ConfigError: naming the key and what was expected. Values of fields that are not to be
            shown (`repr=False`) are not shown.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
    # A key that is misspelt is also one that is missing: that it is unknown tells more.
    first = next((one for one in wrong if one["type"] == "extra_forbidden"), wrong[0])
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        raise unknown_key(
            place[-1], [*model.model_fields, *sorted(also_known)], file=file, parent=key
        )
    told = first["msg"].removeprefix("Value error, ")
    raise ConfigError(
        told + _found(model, values, place),
        file=file,
        key=".".join([key, *place]),
        expected=_expected(model, place),
    )


def refuse_isolation(config: Mapping[str, Any], *, tool: str) -> None:
    """Check that a tool that only awaits is left on the event loop, where its connections are.

    Raises:
        ConfigError: for `isolation: thread` or `process`.
    """
    isolation = ToolSettings.check(config).isolation
    if isolation is not Isolation.NONE:
        raise ConfigError(
            f"isolation is {str(isolation)!r}: {tool} only waits for others, and blocks nothing",
            key="config.isolation",
            expected="none, or no such key",
        )


def require_package(package: str, *, extra: str, what: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        MissingExtraError: naming the extra that brings it.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package!r}, which is not installed",
            install=f'pip install "agentrl[{extra}]"',
        )


def _found(model: type[Section], values: Mapping[str, Any], place: list[str]) -> str:
    if not place or place[0] not in values or not model.model_fields[place[0]].repr:
        return ""
    return f" (found {values[place[0]]!r})"


def _expected(model: type[Section], place: list[str]) -> str:
    field = model.model_fields.get(place[0]) if place else None
    if field is None or field.description is None:
        return f"a mapping with {', '.join(model.model_fields)}"
    return " ".join(field.description.split())
