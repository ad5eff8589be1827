"""Names that users of other libraries and of earlier layouts write; see `other_names.yaml`."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from agentrl.config.tables import load_table
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

_ROOT = "actor_rollout_ref."


def read_other_names(given: DictConfig, verls_keys: Collection[str] = ()) -> dict[str, str]:
    """Move the values of keys with another name to agentrl's keys, in place; report each.

    Args:
        given: The content of a run file.
        verls_keys: If it is verl's tree, its keys: a key gets verl's name if there is one.

    Returns:
        The names that were moved, each with its key.

    Raises:
        ConfigError: if a key is given under both names, with two values.
    """
    moved: dict[str, str] = {}
    for name, keys in table()["read"].items():
        ours = [keys] if isinstance(keys, str) else cast("list[str]", keys)
        targets = [_ROOT + key if _ROOT + key in verls_keys else key for key in ours]
        for spelled in (name, _ROOT + name):
            section, _, leaf = spelled.rpartition(".")
            parent: Any = OmegaConf.select(given, section, throw_on_resolution_failure=False)
            if not isinstance(parent, DictConfig) or leaf not in parent:
                continue
            node = parent._get_node(leaf)  # pyright: ignore[reportPrivateUsage] - the value before it is resolved
            value = OmegaConf.select(given, spelled, throw_on_resolution_failure=False)
            for target in targets:
                other = OmegaConf.select(given, target, throw_on_resolution_failure=False)
                if other is not None and other != value:
                    message = f"{spelled} is another name of {target}; they are {value} and {other}"
                    raise ConfigError(message, key=target, expected=f"{target} alone")
                OmegaConf.update(given, target, node, force_add=True)
            parent.pop(leaf)
            if not parent and "." not in section:
                given.pop(section)
            moved[spelled] = targets[0]
            logger.warning("note: %s is read as %s", spelled, " and ".join(targets))
    return moved


def find_refusal(key: str) -> str | None:
    """Return why a key is refused that neither verl nor agentrl has, if that is known."""
    return _by_end("refused", key)


def find_meant(key: str) -> str | None:
    """Return the key that a name of another library means, if that is known."""
    return _by_end("meant", key)


def table() -> dict[str, dict[str, Any]]:
    """Return the content of `other_names.yaml`."""
    return load_table(Path(__file__).with_name("other_names.yaml"))


def _by_end(kind: str, key: str) -> str | None:
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((found for end in ends if (found := table()[kind].get(end))), None)
