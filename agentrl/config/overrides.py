"""Overrides of the command line: `key=value`, and Hydra's `+key=value`, `++key=value`, `~key`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.errors import ConfigError


def apply_overrides(base: DictConfig, overrides: Sequence[str], file: Path | None) -> DictConfig:
    """Lay overrides over a file, in their order.

    Args:
        base: The file's content.
        overrides: The value is YAML. `+` and `++`, by which Hydra adds a key, set it as well; `~`
            takes a key of the file away.
        file: Named in errors.

    Raises:
        ConfigError: for one that cannot be read.
    """
    for override in overrides:
        base = _apply(base, override, file)
    return base


def key_of(override: str) -> str:
    """Return the dotted key that an override sets or takes away."""
    return override.partition("=")[0].lstrip("+~")


def _apply(base: DictConfig, override: str, file: Path | None) -> DictConfig:
    key = key_of(override)
    if "@" in key or "/" in key:
        told = f"{override!r} chooses a file of Hydra's, and agentrl composes none"
        raise ConfigError(told, key=key, expected="section.key=value")
    if override.startswith("~") and key:
        return _without(base, key)
    if "=" not in override or not key:
        raise ConfigError(f"{override!r} is no override", expected="section.key=value")
    try:
        given = OmegaConf.from_dotlist([override.lstrip("+")])
        _refuse_narrow_colons(given, override)
        return cast("DictConfig", OmegaConf.merge(base, given))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"cannot read the override {override!r}: {told}",
            file=file,
            key=key,
            expected="a YAML value",
        ) from None


def _without(base: DictConfig, key: str) -> DictConfig:
    section, _, leaf = key.rpartition(".")
    parent: Any = OmegaConf.select(base, section) if section else base
    if isinstance(parent, DictConfig):
        parent.pop(leaf, None)
    return base


def _refuse_narrow_colons(given: DictConfig, override: str) -> None:
    """Refuse `{a:1}`, a mapping for Hydra, which YAML reads as the key "a:1" with no value."""
    for key, value in _entries(OmegaConf.to_container(given, resolve=False)):
        if ":" in key and value is None:
            raise ConfigError(
                f"{override!r} has no blank behind a colon, so YAML reads no value there",
                expected=f"{key.replace(':', ': ', 1)}",
            )


def _entries(node: Any) -> list[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        return []
    entries = cast("Mapping[Any, Any]", node).items()
    return [(str(k), v) for k, v in entries] + [e for _, v in entries for e in _entries(v)]
