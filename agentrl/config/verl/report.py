"""What became of a file in verl's key tree, for its user to read."""

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError

VERSION = "0.6.1"
"""The version of verl whose keys and defaults are read."""


@dataclass(frozen=True)
class TakenKey:
    """A key that is read, and what it became."""

    key: str
    """verl's."""
    value: Any
    settings: Mapping[str, Any]
    """Our keys and their values; none where ours are that already."""
    note: str = ""
    """What differs from its meaning there; empty where nothing does."""
    part_of: str = ""
    """The key with which it is read; empty where it is read for itself."""
    is_default: bool = False
    """Whether the value is verl's default, and nobody set it."""

    def __str__(self) -> str:
        whose = " (verl's default)" if self.is_default else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.key}={shown(self.value)}{whose} -> {self._ours}{note}"

    @property
    def _ours(self) -> str:
        if self.part_of:
            return f"read with {self.part_of}"
        ours = ", ".join(f"{key}={shown(value)}" for key, value in self.settings.items())
        return ours or "as it is here"


@dataclass(frozen=True)
class LeftKey:
    """A key that became nothing."""

    key: str
    value: Any
    why: str
    is_dead: bool
    """Whether it is without effect in verl too."""
    row: str = ""
    """The table's row, where it stands for a whole section (`critic.*`)."""
    is_default: bool = False
    """Whether the value is verl's default, written out."""

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)}: {self.why}"


@dataclass(frozen=True)
class VerlReport:
    """The one report: what was taken, what has no counterpart, what is dead there too."""

    taken: tuple[TakenKey, ...]
    """In the order of the file, then verl's defaults that differ from ours."""
    left: tuple[LeftKey, ...]
    """In the order of the file."""

    @property
    def without(self) -> list[LeftKey]:
        """The keys without a counterpart here; what is trained does not depend on them."""
        return [item for item in self.left if not item.is_dead]

    @property
    def dead(self) -> list[LeftKey]:
        """The keys that verl accepts, and that are without effect there as here."""
        return [item for item in self.left if item.is_dead]

    @property
    def origins(self) -> dict[str, str]:
        """Our keys, and the key of verl's that set each."""
        return {ours: item.key for item in reversed(self.taken) for ours in item.settings}

    def in_their_names(self, told: str) -> str:
        """List the keys of verl's behind those of ours that a message names; empty for none."""
        named = {
            ours: theirs
            for ours, theirs in self.origins.items()
            if ours != theirs and re.search(rf"(?<![\w.]){re.escape(ours)}(?!\w)", told)
        }
        return ", ".join(f"{ours} is {theirs}" for ours, theirs in named.items())

    def in_short(self) -> str:
        """Say what a user should know before the run; the rest is counted."""
        given = [item for item in self.taken if not item.is_default]
        defaults = [item for item in self.taken if item.is_default and item.settings]
        counts = (
            f"{_keys(given)} of verl's tree taken, {len(defaults)} of its defaults that are not "
            f"ours, {_keys(self.without)} without counterpart, {len(self.dead)} dead there too "
            "(each of them: agentrl config check)"
        )
        differing = [str(item) for item in (*given, *defaults) if item.note]
        plain = [f"{i.key}={shown(i.value)}" for i in defaults if not i.note]
        return "\n".join(
            [
                counts,
                *_titled("read differently", differing),
                *_titled("verl's defaults", [", ".join(plain)] if plain else []),
                *_titled("no counterpart", _by_reason(self.without)),
                *_titled("dead there too", _by_reason(self.dead)),
            ]
        )

    def in_full(self) -> str:
        """List every key, in three lists."""
        return "\n".join(
            [
                f"Read from the key tree of verl {VERSION}.",
                *_titled(f"taken ({len(self.taken)})", map(str, self.taken)),
                *_titled(f"no counterpart ({len(self.without)})", map(str, self.without)),
                *_titled(f"dead there too ({len(self.dead)})", map(str, self.dead)),
            ]
        )


@contextmanager
def naming_their_keys(report: VerlReport | None) -> Generator[None]:
    """Add verl's names to an error of the `with` block that names ours; None adds nothing."""
    try:
        yield
    except ConfigError as error:
        if report is not None and (names := report.in_their_names(str(error))):
            error.details["in verl's names"] = names
        raise


def shown(value: Any) -> str:
    """Write a value as YAML reads it, in one line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _keys(items: Sequence[object]) -> str:
    return f"{len(items)} key{'' if len(items) == 1 else 's'}"


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    if listed:
        yield f"  {title}:"
        yield from (f"    {line}" for line in listed)


def _by_reason(keys: Iterable[LeftKey]) -> list[str]:
    groups: dict[str, dict[str, None]] = {}
    for item in keys:
        if not item.is_default:
            groups.setdefault(item.why, {})[item.row or item.key] = None
    return [f"{', '.join(names)}: {why}" for why, names in groups.items()]
