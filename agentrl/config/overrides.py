"""Overrides of the command line: `key=value`, and Hydra's `+key=value`, `++key=value`, `~key`.

As with Hydra, a mapping is merged into the existing one, key by key; any other value, also a list,
replaces the existing one (`~key 'key={a: 1}'` does so with a mapping). `key={}` empties a mapping,
and `{}` inside a value changes nothing.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

import yaml
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.errors import ConfigError
from agentrl.given_texts import rewrite

_TOKEN = re.compile(
    r"""(?<![^\s{\[,:])(?:"(?:\\.|[^"\\])*"|'[^']*')|[{}\[\],:]|[^{}\[\],:\s]+|\s+"""
)
"""A quoted text, a sign of a flow mapping or list, the text between signs, blanks."""


def apply_overrides(
    base: DictConfig, overrides: Sequence[str], *, as_texts: bool = False
) -> DictConfig:
    """Apply overrides to a file's content, in their order.

    Args:
        base: The file's content.
        overrides: The value is YAML; `{a:1}` needs no blank, as with Hydra. `+` and `++`, by which
            Hydra adds a key, set it as well; `~` removes a key of the file.
        as_texts: Make every value except null the text that was given.

    Raises:
        ConfigError: for an override that cannot be read.
    """
    for override in overrides:
        base = _apply(base, override, as_texts=as_texts)
    return base


def key_of(override: str) -> str:
    """Return the dotted key that an override sets or removes."""
    return override.partition("=")[0].lstrip("+~")


def _apply(base: DictConfig, override: str, *, as_texts: bool) -> DictConfig:
    key = key_of(override)
    if not override.strip():
        message = f"{override!r} is a blank and no override"
        expected = "section.key=value; in a script a blank after a backslash ends the command there"
        raise ConfigError(message, expected=expected)
    if "@" in key or "/" in key:
        message = f"{override!r} chooses a file of Hydra, and agentrl composes no files"
        raise ConfigError(message, key=key, expected="section.key=value")
    if override.startswith("~") and key:
        return _without(base, key)
    if "=" not in override or not key:
        raise ConfigError(f"{override!r} is no override", expected="section.key=value")
    try:
        value = rewrite(_with_blanks(override.partition("=")[2]), as_texts=as_texts)
        given = OmegaConf.from_dotlist([f"{key}={value}"])
        put, old = (
            OmegaConf.select(config, key, throw_on_resolution_failure=False)
            for config in (given, base)
        )
        # Two containers of different kinds cannot be merged, and an empty one adds nothing.
        if (
            isinstance(old, Container)
            and isinstance(put, Container)
            and (not put or type(put) is not type(old))
        ):
            OmegaConf.update(base, key, put, merge=False)
        return cast("DictConfig", OmegaConf.merge(base, given))
    except TypeError:
        message = (
            f"{override!r} replaces a part of a list, or an inner list or mapping by the other"
        )
        expected = "the whole list, section.key=[a, b], or one override for the inner key"
        raise ConfigError(message, key=key, expected=expected) from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"cannot read the override {override!r}: {reason}"
        raise ConfigError(message, key=key, expected="a YAML value") from None


def _without(base: DictConfig, key: str) -> DictConfig:
    section, _, leaf = key.rpartition(".")
    parent: Any = OmegaConf.select(base, section) if section else base
    if isinstance(parent, DictConfig):
        parent.pop(leaf, None)
    return base


def _with_blanks(value: str) -> str:
    """Write `{a:1}` as `{a: 1}`: Hydra reads a mapping, YAML the key "a:1" without a value."""
    if not value.lstrip().startswith(("{", "[")):
        return value
    written, inside, is_key = "", [""], False
    for token in _TOKEN.findall(value):
        written += ": " if token == ":" and is_key else token
        if token in ("{", "["):
            inside.append(token)
        elif token in ("}", "]"):
            inside = inside[:-1] or [""]
        if token in ("{", ","):
            is_key = inside[-1] == "{"
        elif token in ("[", ":"):
            is_key = False
    return written
