"""The report for the user of a file in verl's key tree: what each key became."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERSION = "0.6.1"
"""The version of verl with these keys and defaults."""


@dataclass(frozen=True)
class MappedKey:
    """A key that is read, and what it became."""

    key: str
    """verl's."""
    value: Any
    settings: Mapping[str, Any]
    """agentrl's keys and their values; empty if agentrl does the same without a key."""
    note: str = ""
    """How its meaning differs from verl's; empty if it does not."""
    part_of: str = ""
    """The key with which it is read; empty if it is read alone."""
    is_default: bool = False
    """Whether the value is verl's default, and the user did not set it."""

    def __str__(self) -> str:
        origin = " (verl's default)" if self.is_default else ""
        ours = ", ".join(f"{key}={shown(value)}" for key, value in self.settings.items())
        ours = f"read with {self.part_of}" if self.part_of else ours or "as it is here"
        note = f": {self.note}" if self.note else ""
        return f"{self.key}={shown(self.value)}{origin} -> {ours}{note}"


@dataclass(frozen=True)
class DroppedKey:
    """A key that sets nothing."""

    key: str
    value: Any
    why: str
    is_unsupported: bool
    """Whether agentrl has no such setting; False: the key has no effect in verl either."""
    row: str = ""
    """The table's entry, if it is for a whole section (`critic.*`)."""
    is_default: bool = False
    """Whether the value is verl's default, written out."""

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)}: {self.why}"


@dataclass(frozen=True)
class VerlReport:
    """What each key of a file in verl's key tree became."""

    mapped: tuple[MappedKey, ...]
    """In the order of the file, then verl's defaults that differ from agentrl's."""
    dropped: tuple[DroppedKey, ...]
    """In the order of the file."""

    @property
    def unsupported(self) -> list[DroppedKey]:
        """The keys without a counterpart here; what is trained does not depend on them."""
        return [item for item in self.dropped if item.is_unsupported]

    @property
    def no_effect(self) -> list[DroppedKey]:
        """The keys that verl accepts, without an effect in verl or here."""
        return [item for item in self.dropped if not item.is_unsupported]

    @property
    def origins(self) -> dict[str, str]:
        """Agentrl's keys, and the key of verl that set each."""
        return {ours: item.key for item in reversed(self.mapped) for ours in item.settings}

    def name_in_verl(self, message: str) -> dict[str, str]:
        """Return a detail for an error: verl's names of the keys that its message names, if any."""
        named = [
            f"{ours} is {theirs}"
            for ours, theirs in self.origins.items()
            if ours != theirs and re.search(rf"(?<![\w.]){re.escape(ours)}(?!\w)", message)
        ]
        return {"in verl's names": ", ".join(named)} if named else {}

    def summarize(self) -> str:
        """Write what a user should know before the run; the rest is counted."""
        given = [item for item in self.mapped if not item.is_default]
        defaults = [item for item in self.mapped if item.is_default and item.settings]
        counts = (
            f"{_keys(given)} of verl's tree read, {len(defaults)} of its defaults that differ from "
            f"agentrl's, {_keys(self.unsupported)} without counterpart, {len(self.no_effect)} "
            "without effect in verl too (all of them: agentrl config check)"
        )
        differing = [str(item) for item in (*given, *defaults) if item.note]
        plain = [f"{i.key}={shown(i.value)}" for i in defaults if not i.note]
        return "\n".join(
            [
                counts,
                *_titled("read differently", differing),
                *_titled("verl's defaults", [", ".join(plain)] if plain else []),
                *_titled("no counterpart", _by_reason(self.unsupported)),
                *_titled("no effect in verl too", _by_reason(self.no_effect)),
            ]
        )

    def describe(self) -> str:
        """List every key, in three lists."""
        lists = {"read": self.mapped, "no counterpart": self.unsupported,
                 "no effect in verl too": self.no_effect}  # fmt: skip
        lines = [
            line
            for title, items in lists.items()
            for line in _titled(f"{title} ({len(items)})", map(str, items))
        ]
        return "\n".join([f"Read from the key tree of verl {VERSION}.", *lines])


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


def _by_reason(keys: Iterable[DroppedKey]) -> list[str]:
    groups: dict[str, dict[str, None]] = {}
    for item in keys:
        if not item.is_default:
            groups.setdefault(item.why, {})[item.row or item.key] = None
    return [f"{', '.join(names)}: {why}" for why, names in groups.items()]
