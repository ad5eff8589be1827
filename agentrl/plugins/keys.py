"""Read the keys that a plug-in is given, and name every mistake in them.

What was found is shown where it tells something, and never where it may be a secret: of a field
that keeps it out of its repr (`repr=False`, `SecretStr`), or of a section that hides its input.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import AgentRLError, ConfigError, did_you_mean
from agentrl.validation_messages import malformed, section_types, unresolved, what_was_expected

Keys = TypeVar("Keys", bound=BaseModel)
Loc = tuple[int | str, ...]
_PLAIN = (str, int, float)


def read_keys(
    model: type[Keys],
    values: Any,
    *,
    key: str,
    file: str | Path | None = None,
    also_known: Iterable[str] = (),
) -> Keys:
    """Check what a user wrote against the keys that are read.

    Args:
        model: The keys that are read.
        values: What the user wrote; a mapping, if it is right.
        key: Under which key it stands, for the error; empty: at the top.
        file: Where it stands, for the error.
        also_known: Keys that are read elsewhere: passed over here, and named beside the model's own
            where one is unknown.

    Raises:
        ConfigError: for the first mistake, with file, key, what was expected, and the nearest key
            where it is an unknown one.

    Example:
        >>> read_keys(SearchConfig, config, key="config", also_known=SHARED_KEYS)
    """
    elsewhere = set(also_known) - model.model_fields.keys()
    try:
        return model.model_validate(_without(values, elsewhere))
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    # A key that is misspelt is also one that is missing: that it is unknown tells more.
    first = next((one for one in wrong if one["type"] == "extra_forbidden"), wrong[0])
    loc = first["loc"]
    section, fields = _way_to(model, loc)
    if first["type"] == "extra_forbidden":
        known = [*section.model_fields, *(sorted(elsewhere) if len(loc) == 1 else ())]
        raise unknown_key(str(loc[-1]), known, file=file, parent=_dotted(loc[:-1], key))
    is_secret = any(map(_is_secret, fields)) or _hides(model) or _hides(section)
    raise ConfigError(
        _told(first, _dotted(loc) or key, is_secret=is_secret),
        file=file,
        key=_dotted(loc, key) or None,
        expected=_expected(first, section, fields),
    )


def unknown_key(
    key: str, known: Iterable[str], *, file: str | Path | None, parent: str = ""
) -> ConfigError:
    """Build the error for a key that nothing reads, with the nearest one that something reads."""
    names = list(known)
    return ConfigError(
        f"unknown key {key!r}{did_you_mean(key, names)}",
        file=file,
        key=f"{parent}.{key}" if parent else key,
        expected=f"one of {', '.join(names)}" if names else "no keys",
    )


def _without(values: Any, left_out: set[str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    mapping = cast("Mapping[Any, Any]", values)
    return {name: value for name, value in mapping.items() if name not in left_out}


def _way_to(model: type[BaseModel], loc: Loc) -> tuple[type[BaseModel], list[FieldInfo]]:
    """Follow a place inwards: the innermost section on the way to it, and the fields passed."""
    section, fields = model, list[FieldInfo]()
    for name in (part for part in loc if isinstance(part, str)):
        if name not in section.model_fields:
            break
        fields.append(section.model_fields[name])
        inner = section_types(fields[-1].annotation)
        if not inner:
            break
        section = inner[0]
    return section, fields


def _is_secret(field: FieldInfo) -> bool:
    options = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return not field.repr or SecretStr in options


def _hides(section: type[BaseModel]) -> bool:
    return section.model_config.get("hide_input_in_errors", False)


def _told(first: ErrorDetails, place: str, *, is_secret: bool) -> str:
    """Say what is wrong, with what was found."""
    shown = None if is_secret else _shown(first["input"])
    if first["type"] == "missing":
        return f"{place} is missing" + (f" (found {shown})" if shown else "")
    reason = str(first.get("ctx", {}).get("error", ""))
    if reason and not first["loc"]:
        return reason
    if shown is not None:
        place = f"{place} is {shown}"
    elif not reason:
        place = f"{place} is nothing that can be meant"
    return ": ".join(filter(None, [place, reason]))


def _shown(found: Any) -> str | None:
    """Write out what was found, nothing of it cut; of what holds other things only their names."""
    if isinstance(found, Mapping):
        names = ", ".join(map(str, cast("Mapping[Any, Any]", found)))
        return f"a mapping with {names or 'nothing'}"
    if isinstance(found, list | tuple):
        items = cast("Sequence[Any]", found)
        return repr(items) if all(isinstance(item, _PLAIN) for item in items) else "a list"
    return repr(found) if found is None or isinstance(found, _PLAIN) else None


def _expected(first: ErrorDetails, section: type[BaseModel], fields: list[FieldInfo]) -> str:
    """Say what would have been right: the rule, and what the key is for."""
    told = (fields[-1].description or "") if fields else ""
    purpose = " ".join(told.split()).partition(". ")[0].removesuffix(".")
    if first["type"] in ("missing", "value_error") and purpose:
        return purpose
    if not fields or first["type"].startswith("model_"):
        rule = f"a mapping with {', '.join(section.model_fields)}"
    else:
        rule = what_was_expected(first)
    return f"{rule} ({purpose})" if purpose else rule


def _dotted(loc: Loc, key: str = "") -> str:
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return (key + "".join(steps)).removeprefix(".")


_LIMIT = "max_yaml_expanded_nodes"
_MORE_NODES: dict[str, Any] = (
    {_LIMIT: 200_000} if _LIMIT in inspect.signature(OmegaConf.load).parameters else {}
)
"""OmegaConf 2.4 takes 10,000 nodes for an attack; 700 tools with their schemas have as many."""

Entry = TypeVar("Entry", bound=BaseModel)


def read_entries(path: str | Path, key: str, entry: type[Entry]) -> list[Entry]:
    """Read the list under the file's one key, each item checked against `entry`.

    Raises:
        ConfigError: with the file, the key (`tools[1].class_name`) and what was expected.
    """
    file = Path(path)
    data = _read_yaml(file)
    expected = f"a mapping with the one key {key!r} that holds a list"
    if not isinstance(data, dict) or key not in data:
        raise ConfigError(f"the file has no key {key!r}", file=file, expected=expected)
    mapping = cast("dict[Any, Any]", data)
    for other in mapping:
        if other != key:
            raise unknown_key(str(other), [key], file=file)
    items = mapping[key]
    if not isinstance(items, list):
        raise ConfigError(f"{key} is {items!r}", file=file, key=key, expected=expected)
    listed = cast("list[Any]", items)
    return [read_keys(entry, item, key=f"{key}[{i}]", file=file) for i, item in enumerate(listed)]


def add_place(error: AgentRLError, *, file: str | Path, key: str) -> None:
    """Say in which file, and under which key, a class was given what it refuses.

    An error that names a file already says so itself: it was found in another one.

    Args:
        error: Of building a plug-in; a key that it names lies below `key`.
        file: The YAML.
        key: Of what the class was given.
    """
    if "file" in error.details:
        return
    inner = error.details.get("key")
    error.details |= {"file": file, "key": f"{key}.{inner}" if inner else key}


def _read_yaml(file: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(file, **_MORE_NODES), resolve=True)
    except OSError as error:
        looked_in = None if file.is_absolute() else Path.cwd()
        raise ConfigError(
            f"cannot read the file: {error.strerror}", file=file, looked_in=looked_in
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: {error}", file=file) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(malformed(error, file), file=file, expected="YAML") from error
    except OmegaConfBaseException as error:
        told, expected = unresolved(error)
        raise ConfigError(told, file=file, key=error.full_key, expected=expected) from None
    # ValueError: a number of more digits than Python reads.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the file: {error}", file=file) from error
