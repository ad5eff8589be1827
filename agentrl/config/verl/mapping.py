"""The records of the table: one key of verl's tree, and what becomes of it here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from agentrl.errors import ConfigError

UNSET = "???"
"""OmegaConf's word for a value that must be given; here also: verl 0.6.1 has no such default."""


class Tree(Protocol):
    """verl's keys with their values: those that were given, and verl's defaults below them."""

    def value(self, key: str) -> Any:
        """Resolve a key's value, as plain Python."""
        ...

    def is_given(self, key: str) -> bool:
        """Whether the file or the command line sets it, or a key below it."""
        ...

    def is_changed(self, key: str) -> bool:
        """Whether the file or the command line sets it to something else than verl's default."""
        ...

    def is_chosen(self, key: str) -> bool:
        """Whether somebody chose its value, be it verl's default."""
        ...


@dataclass(frozen=True)
class Reading:
    """What a value of verl's means in our keys."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Our dotted keys, and their values; none where ours need not be set."""
    note: str = ""
    """What differs from what it meant there; empty where nothing does."""
    part_of: str = ""
    """The key of verl's with which this one is read; empty where it is read for itself."""


@dataclass(frozen=True)
class Unused:
    """A value that verl itself does not look at in this configuration."""

    why: str
    """A clause, such as "`use_dynamic_bsz` is false"."""


@dataclass(frozen=True)
class Refused:
    """What it asks for is not here, and would change what is trained."""

    harmless: tuple[Any, ...]
    """Values that ask for nothing."""
    why: str
    """What is missing, and what to use in its place."""


@dataclass(frozen=True)
class Left:
    """Without a counterpart; what is trained does not depend on it."""

    why: str
    """What is done here, or what to use in its place."""


Reader = Callable[[Any, Tree], Reading | Unused | Left]
"""Reads a value; raises `ConfigError` for one that cannot be meant here."""


@dataclass(frozen=True)
class Taken:
    """Read into keys of ours."""

    ours: tuple[str, ...]
    """Those that it may set."""
    read: Reader


@dataclass(frozen=True)
class Dead:
    """Accepted by verl 0.6.1, and read by nothing there (or by nothing that is chosen)."""

    why: str


Fate = Taken | Refused | Left | Dead


@dataclass(frozen=True)
class VerlKey:
    """A row of the table."""

    name: str
    """Dotted, as verl writes it; a trailing `.*` stands for every key below."""
    default: Any
    """That of verl 0.6.1; `UNSET` where it has none."""
    fate: Fate

    def covers(self, key: str) -> bool:
        """Whether `key` is this one, or below it."""
        return key == self.name or (self.name.endswith(".*") and key.startswith(self.name[:-1]))


def taken(name: str, default: Any, read: Reader, *ours: str) -> VerlKey:
    """Make the row of a key that a function reads."""
    return VerlKey(name, default, Taken(ours, read))


def same(name: str, default: Any, ours: str | None = None, *, note: str = "") -> VerlKey:
    """Make the row of a key whose value is ours as it is; `ours`: under another name."""
    target = ours or name

    def read(value: Any, tree: Tree) -> Reading:
        is_off = value is None and isinstance(default, bool)  # Python, so verl too, reads it so
        return Reading({target: False if is_off else value}, note)

    return VerlKey(name, default, Taken((target,), read))


def part(name: str, default: Any, whole: str) -> VerlKey:
    """Make the row of a key that is read with another one, and only where that one is not null."""

    def read(value: Any, tree: Tree) -> Reading | Unused:
        return Unused(f"{whole} is null") if tree.value(whole) is None else Reading(part_of=whole)

    return VerlKey(name, default, Taken((), read))


def refused(name: str, default: Any, *harmless: Any, why: str) -> VerlKey:
    """Make the row of a key that may only say what is the case here: the default, or `harmless`."""
    allowed = harmless if default == UNSET else (default, *harmless)
    return VerlKey(name, default, Refused(allowed, why))


def left(why: str, defaults: Mapping[str, Any]) -> list[VerlKey]:
    """Make rows of keys without a counterpart, all for one reason."""
    return [VerlKey(name, default, Left(why)) for name, default in defaults.items()]


def dead(why: str, defaults: Mapping[str, Any]) -> list[VerlKey]:
    """Make rows of keys that do nothing in verl either, all for one reason."""
    return [VerlKey(name, default, Dead(why)) for name, default in defaults.items()]


def under(prefix: str, rows: Iterable[VerlKey]) -> list[VerlKey]:
    """Put rows below a section."""
    return [VerlKey(f"{prefix}.{row.name}", row.default, row.fate) for row in rows]


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
