"""Read the YAML that lists plug-ins, and name file and key of every mistake in it.

Interpolation works as in a run file: `${oc.env:SEARCH_URL}` is read from the environment.
"""

from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from agentrl.errors import ConfigError
from agentrl.plugins.keys import read_keys, unknown_key

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


def _read_yaml(file: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", file=file) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: {error}", file=file) from error
    except yaml.MarkedYAMLError as error:
        raise _malformed(error, file) from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read the file: {error}", file=file) from error


def _malformed(error: yaml.MarkedYAMLError, file: Path) -> ConfigError:
    mark = error.problem_mark
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return ConfigError(f"malformed YAML{where}: {error.problem}", file=file, expected="YAML")
