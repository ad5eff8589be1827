"""The tables of `keys.yaml`: every key of verl 0.6.1 (and some of 0.9.1), and other trainers."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config.tables import load_table
from agentrl.config.verl import (
    mapping,
    policy_readers,
    reward_model_readers,
    rollout_readers,
    run_readers,
)
from agentrl.config.verl.mapping import UNSET, KeyMapping, NoEffect, Rejected, Unsupported

_READERS = {
    name: reader
    for module in (mapping, policy_readers, reward_model_readers, rollout_readers, run_readers)
    for name, reader in vars(module).items()
}


def load_trainers() -> list[dict[str, Any]]:
    """Return verl's trainers that agentrl does not have: how to recognize a file, what to say."""
    return load_table(Path(__file__).with_name("keys.yaml"))["trainers"]


@cache
def table() -> tuple[KeyMapping, ...]:
    """Return the entries of all keys, in the order of `keys.yaml`."""
    sections = load_table(Path(__file__).with_name("keys.yaml"))["keys"]
    return tuple(
        _entry(f"{section}.{name}".removeprefix("."), facts)
        for section, keys in sections.items()
        for name, facts in keys.items()
    )


def _entry(name: str, facts: Mapping[str, Any]) -> KeyMapping:
    default, outcome = facts.get("default", UNSET), None
    if why := facts.get("rejected"):
        harmless = () if default == UNSET else (default,)
        outcome = Rejected(why, (*harmless, *facts.get("allowed", ())))
    elif why := facts.get("unsupported"):
        outcome = Unsupported(why)
    elif why := facts.get("no_effect"):
        outcome = NoEffect(why)
    shared = "part" if "read_with" in facts else "copy" if "copy_of" in facts else "same"
    ours = facts.get("ours", ())
    return KeyMapping(
        name=name,
        default=default,
        outcome=outcome,
        read=_READERS[facts.get("read", shared)],
        ours=(ours,) if isinstance(ours, str) else tuple(ours),
        other=facts.get("read_with") or facts.get("copy_of") or "",
        note=facts.get("note", ""),
    )


@cache
def single_keys() -> dict[str, KeyMapping]:
    """Map the name of each single key (no `.*`) to its entry."""
    return {row.name: row for row in table() if not row.name.endswith(".*")}


def find_key(key: str) -> KeyMapping | None:
    """Find the entry of a key; an entry of its own comes before one of a whole section."""
    return single_keys().get(key) or next((row for row in table() if row.covers(key)), None)


@cache
def is_section(key: str) -> bool:
    """Whether the table has keys below this one."""
    return any(row.name.startswith(f"{key}.") for row in table())
