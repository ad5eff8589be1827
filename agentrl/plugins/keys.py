"""Read the YAML and the keys of plug-ins, and name file and key of every mistake in them.

Errors show the value that was found, except one that may be a secret: a field with `repr=False` or
of type `SecretStr`, or a section that hides its input. In the YAML that lists plug-ins,
interpolation works as in a run file: `${oc.env:SEARCH_URL}` is read from the environment.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import AgentRLError, ConfigError, describe_missing, did_you_mean
from agentrl.given_texts import Loc, load_yaml, value_at, with_texts
from agentrl.validation_messages import (
    describe_expected,
    describe_malformed,
    describe_unresolved,
    dotted,
    section_types,
)

Keys = TypeVar("Keys", bound=BaseModel)
_PLAIN = (str, int, float)
_LIMIT = "max_yaml_expanded_nodes"
_MORE_NODES: dict[str, Any] = (
    {_LIMIT: 200_000} if _LIMIT in inspect.signature(OmegaConf.load).parameters else {}
)
"""OmegaConf 2.4 refuses more than 10,000 nodes as an attack; 700 tools with schemas have more."""


def read_keys(
    model: type[Keys],
    values: Any,
    *,
    key: str,
    file: str | Path | None = None,
    also_known: Iterable[str] = (),
) -> Keys:
    """Check the keys that a user wrote against those that are read.

    Args:
        model: The keys that are read.
        values: What the user wrote; a mapping, if it is right.
        key: The key above them, for the error; empty at the top.
        file: Their file, for the error.
        also_known: Keys that are read elsewhere: skipped here, and named together with the model's
            keys if a key is unknown.

    Raises:
        ConfigError: for the first mistake, with file, key, what was expected, and for an unknown
            key the nearest known one.

    Example:
        >>> read_keys(SearchConfig, config, key="config", also_known=SHARED_KEYS)
    """
    elsewhere = set(also_known) - model.model_fields.keys()
    if isinstance(values, Mapping):
        given = cast("Mapping[Any, Any]", values)
        values = {name: value for name, value in given.items() if name not in elsewhere}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # A misspelled required key is also missing; that it is unknown says more.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    loc = first["loc"]
    section, fields = _follow(model, loc)
    if first["type"] == "extra_forbidden":
        known = [*section.model_fields, *(sorted(elsewhere) if len(loc) == 1 else ())]
        raise unknown_key(str(loc[-1]), known, file=file, parent=dotted(loc[:-1], key))
    is_hidden = any(one.model_config.get("hide_input_in_errors") for one in (model, section))
    is_secret = is_hidden or any(map(_is_secret, fields))
    raise ConfigError(
        _message(first, dotted(loc) or key, is_secret=is_secret),
        file=file,
        key=dotted(loc, key) or None,
        expected=_expected(first, section, fields),
    )


def unknown_key(
    key: str, known: Iterable[str], *, file: str | Path | None, parent: str = ""
) -> ConfigError:
    """Build the error for an unknown key, with the nearest known one."""
    names = list(known)
    return ConfigError(
        f"unknown key {key!r}{did_you_mean(key, names)}",
        file=file,
        key=f"{parent}.{key}" if parent else key,
        expected=f"one of {', '.join(names)}" if names else "no keys",
    )


def read_entries(path: str | Path, key: str, entry: type[Keys]) -> list[Keys]:
    """Read the list under the file's one key, and check each item against `entry`.

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
    texts = cache(lambda: _read_yaml(file, as_texts=True))
    return [
        read_keys(
            entry,
            with_texts(entry.model_validate, item, partial(_text_at, texts, (key, i))),
            key=f"{key}[{i}]",
            file=file,
        )
        for i, item in enumerate(listed)
    ]


def _text_at(texts: Callable[[], Any], above: Loc, loc: Loc) -> Any:
    return value_at(texts(), (*above, *loc))


def add_place(error: AgentRLError, *, file: str | Path, key: str) -> None:
    """Add the file and the key to the error of a class that refused its configuration.

    An error that names a file already keeps it: the mistake is in that file.

    Args:
        error: Raised while a plug-in was built; a key that it names is below `key`.
        file: The YAML.
        key: The key of the class's configuration.
    """
    if "file" in error.details:
        return
    inner = error.details.get("key")
    error.details |= {"file": file, "key": f"{key}.{inner}" if inner else key}


def _read_yaml(file: Path, *, as_texts: bool = False) -> Any:
    try:
        loaded = load_yaml(file, as_texts=as_texts, **_MORE_NODES)
        return OmegaConf.to_container(loaded, resolve=True)
    except OSError as error:
        looked_in = None if file.is_absolute() else Path.cwd()
        is_missing = isinstance(error, FileNotFoundError)
        reason = describe_missing(file) if is_missing else f"cannot read the file: {error.strerror}"
        raise ConfigError(reason, file=file, looked_in=looked_in, expected="a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: {error}", file=file) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(describe_malformed(error, file), file=file, expected="YAML") from error
    except OmegaConfBaseException as error:
        message, expected = describe_unresolved(error)
        raise ConfigError(message, file=file, key=error.full_key, expected=expected) from None
    # ValueError: a number with more digits than Python reads.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the file: {error}", file=file) from error


def _follow(
    model: type[BaseModel], loc: Sequence[int | str]
) -> tuple[type[BaseModel], list[FieldInfo]]:
    """Return the innermost section on the way to a location, and the fields on that way."""
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


def _message(first: ErrorDetails, key: str, *, is_secret: bool) -> str:
    """Describe what is wrong, with the value that was found."""
    shown = None if is_secret else _shown(first["input"])
    if first["type"] == "missing":
        return f"{key} is missing" + (f" (found {shown})" if shown else "")
    reason = str(first.get("ctx", {}).get("error", ""))
    if reason and not first["loc"]:
        return reason
    if shown is not None:
        key = f"{key} is {shown}"
    elif not reason:
        key = f"{key} has a value that is not allowed"
    return ": ".join(filter(None, [key, reason]))


def _shown(found: Any) -> str | None:
    """Write the value that was found in full; of nested values only their names."""
    if isinstance(found, Mapping):
        names = ", ".join(map(str, cast("Mapping[Any, Any]", found)))
        return f"a mapping with {names or 'nothing'}"
    if isinstance(found, list | tuple):
        items = cast("Sequence[Any]", found)
        return repr(items) if all(isinstance(item, _PLAIN) for item in items) else "a list"
    return repr(found) if found is None or isinstance(found, _PLAIN) else None


def _expected(first: ErrorDetails, section: type[BaseModel], fields: list[FieldInfo]) -> str:
    """Describe what would be right: the rule, and the purpose of the key."""
    text = (fields[-1].description or "") if fields else ""
    purpose = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    if first["type"] in ("missing", "value_error") and purpose:
        return purpose
    if not fields or first["type"].startswith("model_"):
        rule = f"a mapping with {', '.join(section.model_fields)}"
    else:
        rule = describe_expected(first)
    return f"{rule} ({purpose})" if purpose else rule
