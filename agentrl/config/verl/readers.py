"""Readers that serve many keys.

A reader takes a value and verl's whole tree, and gives the keys of ours that it means. What it
cannot mean here is a `ConfigError`, which `agentrl.config.verl.reading` puts under the key's name.
"""

from typing import Any, cast

from agentrl.config.verl.keys import Reader, Reading, Tree
from agentrl.errors import ConfigError


def integer(value: Any, key: str = "") -> int:
    """Read a whole number.

    Args:
        value: A number, or a text that is one.
        key: Where it stands, if it is not the key that is read.

    Raises:
        ConfigError: for anything else.
    """
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        where = f"{key} is " if key else ""
        raise ConfigError(f"{where}{value!r}, no integer", expected="an integer") from None


def count(tree: Tree, key: str) -> int:
    """Read the whole number of another key.

    Raises:
        ConfigError: where it is none.
    """
    return integer(tree.value(key), key)


def keep(ours: str, *, note: str = "") -> Reader:
    """Take a value as it is; null leaves ours at its default."""

    def read(value: Any, tree: Tree) -> Reading:
        return Reading() if value is None else Reading({ours: value}, note)

    return read


def if_given(theirs: str, ours: str) -> Reader:
    """Take a value that somebody chose; verl's default is no better than ours."""

    def read(value: Any, tree: Tree) -> Reading:
        return Reading({ours: value} if tree.is_chosen(theirs) else {})

    return read


def twin(theirs: str, ours: str) -> Reader:
    """Hold a number against the one that it is a copy of, unless it is set apart."""

    def read(value: Any, tree: Tree) -> Reading:
        expected = tree.value(ours)
        if value is not None and integer(value) != integer(expected, ours):
            raise ConfigError(
                f"{value} differs from {ours}, {expected}: here the two are one",
                expected=f"{ours}={value}, and no {theirs}",
            )
        return Reading()

    return read


def as_list(value: Any) -> list[Any]:
    """Put a single value into a list."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]
