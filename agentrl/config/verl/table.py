"""The table: every key of verl 0.6.1's tree (and some of 0.9.1's), and what becomes of it here."""

from functools import cache

from agentrl.config.verl.mapping import VerlKey
from agentrl.config.verl.policy_keys import ACTOR, CRITIC, MODEL, REFERENCE
from agentrl.config.verl.rollout_keys import ROLLOUT
from agentrl.config.verl.run_keys import RUN

TABLE: tuple[VerlKey, ...] = (*MODEL, *ACTOR, *REFERENCE, *ROLLOUT, *CRITIC, *RUN)
"""One row for each key; the first that covers a key is its row, and single keys come first."""


@cache
def single_keys() -> dict[str, VerlKey]:
    """List the rows that stand for one key, by its name."""
    return {row.name: row for row in TABLE if not row.name.endswith(".*")}


def find_key(key: str) -> VerlKey | None:
    """Find the row of a key."""
    return single_keys().get(key) or next((row for row in TABLE if row.covers(key)), None)


@cache
def is_section(key: str) -> bool:
    """Whether there are keys below this one."""
    return any(row.name.startswith(f"{key}.") for row in TABLE)
