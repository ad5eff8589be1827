"""How a key of verl's tree becomes keys of agentrl: the records, and the readers that keys share.

`keys.yaml` has one entry for each key, and `agentrl.config.verl.table` loads it. A reader takes a
value, verl's whole tree and the entry, and returns what the value means here. A value without a
meaning here is a `ConfigError`; `agentrl.config.verl.reading` adds the key to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from agentrl.errors import ConfigError

UNSET = "???"
"""OmegaConf's mark of a value that must be given; here also: verl 0.6.1 has no such default."""


class Tree(Protocol):
    """verl's keys with their values: those that the user gave, and verl's defaults."""

    def value(self, key: str) -> Any:
        """Resolve a key's value, as plain Python."""
        ...

    def is_given(self, key: str) -> bool:
        """Whether the file or the command line sets the key, or a key below it."""
        ...

    def is_changed(self, key: str) -> bool:
        """Whether the file or the command line sets the key to another value than the default."""
        ...

    def is_chosen(self, key: str) -> bool:
        """Whether the user chose the value, even if it is verl's default."""
        ...


@dataclass(frozen=True)
class Mapped:
    """What a value of verl means in agentrl's keys."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """agentrl's dotted keys and their values; empty if none must be set."""
    note: str = ""
    """How the meaning differs from verl's; empty if it does not."""
    part_of: str = ""
    """The verl key that this one is read with; empty if it is read alone."""


@dataclass(frozen=True)
class Ignored:
    """verl itself does not read the value in this configuration."""

    why: str
    """A clause, such as "`use_dynamic_bsz` is false"."""


@dataclass(frozen=True)
class Unsupported:
    """agentrl has no such setting; what is trained does not depend on it."""

    why: str
    """What agentrl does, or what to use instead."""


@dataclass(frozen=True)
class Rejected:
    """agentrl has no such feature, and it would change what is trained."""

    why: str
    """What is missing, and what to use instead."""
    allowed: tuple[Any, ...]
    """Values that leave the feature off."""


@dataclass(frozen=True)
class NoEffect:
    """verl 0.6.1 accepts the key, and nothing in it (or nothing that is chosen) reads it."""

    why: str


@dataclass(frozen=True, kw_only=True)
class KeyMapping:
    """One entry of the table: a key of verl, and what agentrl does with it."""

    name: str
    """Dotted, as verl writes it; a trailing `.*` means every key below."""
    default: Any = UNSET
    """The default of verl 0.6.1; `UNSET` if it has none."""
    outcome: Rejected | Unsupported | NoEffect | None = None
    """What happens to the key without a look at its value; None: `read` decides."""
    read: "Reader"
    ours: tuple[str, ...] = ()
    """The agentrl keys that it may set."""
    other: str = ""
    """The key that it is read with, or must equal."""
    note: str = ""
    """Told to the user by the readers that have no note of their own."""

    def covers(self, key: str) -> bool:
        """Whether `key` is this one, or below it."""
        return key == self.name or (self.name.endswith(".*") and key.startswith(self.name[:-1]))


Reader = Callable[[Any, Tree, KeyMapping], Mapped | Ignored | Unsupported]
"""Reads a value; raises `ConfigError` if it has no meaning here."""


def same(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the value as it is. null means false if the default is a boolean, as in Python."""
    is_off = value is None and isinstance(row.default, bool)
    return Mapped({row.ours[0]: False if is_off else value}, row.note)


def keep(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the value as it is; null keeps agentrl's default."""
    return Mapped() if value is None else Mapped({row.ours[0]: value}, row.note)


def if_chosen(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take a value that the user chose; verl's default is no better than agentrl's."""
    return Mapped({row.ours[0]: value} if tree.is_chosen(row.name) else {})


def part(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Leave the value to the key that it is read with."""
    if tree.value(row.other) is None:
        return Ignored(f"{row.other} is null")
    return Mapped(part_of=row.other)


def copy(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Check that the value equals the one that it is a copy of."""
    expected = tree.value(row.other)
    if value is not None and integer(value) != integer(expected, row.other):
        raise ConfigError(
            f"{value} differs from {row.other}, {expected}; agentrl has one key for both",
            expected=f"{row.other}={value}, and no {row.name}",
        )
    return Mapped()


def integer(value: Any, key: str = "") -> int:
    """Read a whole number.

    Args:
        value: A number, or a text that is one.
        key: Its key, if that is not the key that is read.

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
        ConfigError: if its value is no whole number.
    """
    return integer(tree.value(key), key)


def as_list(value: Any) -> list[Any]:
    """Put a single value into a list."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]
