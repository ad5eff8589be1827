"""Read the YAML that lists plug-ins, and name file and key of every mistake in it.

Interpolation works as in a run file: `${oc.env:SEARCH_URL}` is read from the environment.
"""

import inspect
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from agentrl.errors import AgentRLError, ConfigError
from agentrl.plugins.keys import read_keys, unknown_key
from agentrl.validation_messages import malformed, unresolved

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
