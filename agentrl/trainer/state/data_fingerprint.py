"""Record the rows that a run began with, and describe how a resumed run's rows differ.

A position in the data's order is only meaningful for the same list of rows. A checkpoint keeps
enough information about the rows to say what changed. The run is refused before its model loads.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.schema.run import RunConfig
from agentrl.errors import DataError
from agentrl.messages import restore_numbers
from agentrl.remote_io import Location, locate
from agentrl.trainer.setup.datasets import RunData, fingerprint_of
from agentrl.trainer.setup.rollout_setup import RolloutSetup
from agentrl.trainer.state.resume import checkpoint_folder
from agentrl.workers.checkpoint import STATE, newest_first

RECORD = "rows"
"""Key of the record in a checkpoint's `data`, next to the order's own state."""
_NUM_BLOCKS = 64
_SETTINGS = (
    "seed", "shuffle", "train_max_samples", "max_prompt_length", "filter_overlong_prompts",
    "truncation", "prompt_key", "reward_fn_key", "custom_cls",
)  # fmt: skip
"""Keys of `data` that decide which rows there are, and in which order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """Information about the rows in a checkpoint; all values are JSON."""

    files: list[str]
    settings: dict[str, Any]
    num_rows: int
    fingerprint: str
    blocks: list[str]
    """Hashes of up to 64 equal blocks, in order, to locate a change."""
    in_any_order: str
    """Hash of the sorted rows."""
    prompts_read_by: str
    """Hash of tokenizer, template and tools."""
    val: dict[str, str]
    """Fingerprint of each validation set."""

    @classmethod
    def of(cls, config: RunConfig, data: RunData, setup: RolloutSetup) -> "DataRecord":
        """Record a run's rows."""
        digests = data.train.row_digests
        settings = config.data.model_dump(mode="json", include=set(_SETTINGS))
        return cls(
            files=[str(file) for file in config.data.train_files],
            settings={name: settings[name] for name in _SETTINGS},
            num_rows=len(digests),
            fingerprint=data.train.fingerprint,
            blocks=[_hash(digests[block]) for block in _blocks(len(digests))],
            in_any_order=_hash(sorted(digests)),
            prompts_read_by=fingerprint_of(setup),
            val={name: rows.fingerprint for name, rows in data.val.items()},
        )

    def has_order_of(self, other: "DataRecord") -> bool:
        """Return whether a position in the order means the same row in both records."""
        drawn = [(r.fingerprint, r.settings["seed"], r.settings["shuffle"]) for r in (self, other)]
        return drawn[0] == drawn[1]


def check_rows(record: DataRecord, config: RunConfig) -> list[str]:
    """Check a run's rows against those of the checkpoint that it will resume from.

    Returns:
        Changes that are allowed, a sentence each.

    Raises:
        DataError: if the training rows, or their order, differ from those that the run began with.
    """
    path: Location | None = None
    match config.trainer.resume_mode:
        case "auto":
            # The newest one, even if it is damaged: its rows are those of the run as well.
            path = next((path for _, path in newest_first(checkpoint_folder(config))), None)
        case "resume_path":
            named = config.trainer.resume_from_path
            path = None if named is None else locate(named)
        case "disable":
            pass
    if path is None:
        return []
    try:
        state = json.loads(restore_numbers((path / STATE).read_bytes()))
        before = DataRecord(**state["data"][RECORD])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # reported when the whole checkpoint is read
    if not config.trainer.val_only and not before.has_order_of(record):
        raise DataError(
            "the training rows, or their order, are not those that the run began with:\n  - "
            + "\n  - ".join(_differences(before, record)),
            file=", ".join(record.files),
            checkpoint=path,
            expected="the rows that the run began with, to resume; or "
            "trainer.resume_mode=disable or another trainer.default_local_dir, to start again",
        )
    return list(_notes(before, record))


def _notes(before: DataRecord, now: DataRecord) -> Iterator[str]:
    for name, fingerprint in now.val.items():
        if before.val.get(name, fingerprint) != fingerprint:
            yield (
                f"the validation set {name!r} is not the one that the run began with: do not "
                "compare its metrics before and after this start"
            )
    if before.prompts_read_by != now.prompts_read_by:
        yield (
            "tokenizer, chat template or tools are not those that the run began with: from now on "
            "prompts have other tokens"
        )


def _differences(before: DataRecord, now: DataRecord) -> Iterator[str]:
    for name, value in now.settings.items():
        if before.settings.get(name) != value:
            yield f"data.{name} is {value!r}, was {before.settings.get(name)!r}"
    if before.files != now.files:
        yield f"data.train_files are {', '.join(now.files)}, were {', '.join(before.files)}"
    if before.num_rows != now.num_rows:
        yield f"there are {now.num_rows} rows, there were {before.num_rows}"
        return
    if before.in_any_order == now.in_any_order and before.fingerprint != now.fingerprint:
        yield "they are the same rows in another order"
    blocks = zip(_blocks(now.num_rows), before.blocks, now.blocks, strict=False)
    if changed := next((block for block, old, new in blocks if old != new), None):
        rows = f"one of rows {changed.start} to {changed.stop - 1}"
        if changed.stop == changed.start + 1:
            rows = f"row {changed.start}"
        yield f"the first that differs is {rows}, counted from 0 after the length filter"


def _blocks(count: int) -> list[slice]:
    size = -(-count // _NUM_BLOCKS) or 1
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _hash(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
