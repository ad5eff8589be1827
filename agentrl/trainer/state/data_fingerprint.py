"""Which rows a run began with, and in words how those of a resumed run differ.

The order of the data is a place in one list of rows: with other rows it would mean nothing. A
checkpoint keeps enough of them to say what changed, and the run is refused before its model loads.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.config.schema.run import RunConfig
from agentrl.errors import DataError
from agentrl.trainer.setup.datasets import RunData, fingerprint_of
from agentrl.trainer.setup.rollout_setup import RolloutSetup
from agentrl.trainer.state.resume import checkpoint_folder
from agentrl.workers.checkpoint import STATE, newest_first

RECORD = "rows"
"""Where the record stands in a checkpoint's `data`, beside the order's own state."""
_NUM_BLOCKS = 64
_SETTINGS = (
    "seed", "shuffle", "train_max_samples", "max_prompt_length", "filter_overlong_prompts",
    "truncation", "prompt_key", "reward_fn_key", "custom_cls",
)  # fmt: skip
"""Keys of `data` that decide which rows there are, and in which order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """What a checkpoint keeps of the rows; JSON values throughout."""

    files: list[str]
    settings: dict[str, Any]
    num_rows: int
    fingerprint: str
    blocks: list[str]
    """Hashes of up to 64 equal parts, in order: where a change lies."""
    in_any_order: str
    """Hash of the same rows, whatever their order."""
    prompts_read_by: str
    """Hash of tokenizer, template and tools."""
    val: dict[str, str]
    """Fingerprint of each validation set."""

    @classmethod
    def of(cls, config: RunConfig, data: RunData, setup: RolloutSetup) -> "DataRecord":
        """Take the record of a run's rows."""
        digests = data.train.row_digests
        settings = config.data.model_dump(mode="json", include=set(_SETTINGS))
        return cls(
            files=[str(file) for file in config.data.train_files],
            settings={name: settings[name] for name in _SETTINGS},
            num_rows=len(digests),
            fingerprint=data.train.fingerprint,
            blocks=[_hash(digests[part]) for part in _blocks(len(digests))],
            in_any_order=_hash(sorted(digests)),
            prompts_read_by=fingerprint_of(setup),
            val={name: rows.fingerprint for name, rows in data.val.items()},
        )

    def is_order_of(self, other: "DataRecord") -> bool:
        """Whether a place in the one's order is the same place in the other's."""
        drawn = [(r.fingerprint, r.settings["seed"], r.settings["shuffle"]) for r in (self, other)]
        return drawn[0] == drawn[1]

    def to_json(self) -> dict[str, Any]:
        """Give what a checkpoint keeps."""
        return asdict(self)


def check_rows(record: DataRecord, config: RunConfig) -> list[str]:
    """Hold a run's rows against those of the checkpoint that it will go on from.

    Returns:
        What has changed and may change: a sentence each.

    Raises:
        DataError: where the training rows, or their order, are not those that the run began with.
    """
    path = _checkpoint(config)
    was = None if path is None else _read(path)
    if was is None:
        return []
    if not config.trainer.val_only and not was.is_order_of(record):
        raise DataError(
            "the training rows, or their order, are not those that the run began with:\n  - "
            + "\n  - ".join(_differences(was, record)),
            file=", ".join(record.files),
            checkpoint=path,
            expected="the rows that the run began with, to go on; trainer.resume_mode=disable or "
            "another trainer.default_local_dir, to begin anew",
        )
    return list(_notes(was, record))


def _notes(was: DataRecord, now: DataRecord) -> Iterator[str]:
    for name, fingerprint in now.val.items():
        if was.val.get(name, fingerprint) != fingerprint:
            yield (
                f"the validation set {name!r} is not the one that the run began with: its figures "
                "before and after do not compare"
            )
    if was.prompts_read_by != now.prompts_read_by:
        yield (
            "tokenizer, chat template or tools are not those that the run began with: from here on "
            "prompts have other tokens"
        )


def _differences(was: DataRecord, now: DataRecord) -> Iterator[str]:
    for name, value in now.settings.items():
        if was.settings.get(name) != value:
            yield f"data.{name} is {value!r}, was {was.settings.get(name)!r}"
    if was.files != now.files:
        yield f"data.train_files are {', '.join(now.files)}, were {', '.join(was.files)}"
    if was.num_rows != now.num_rows:
        yield f"there are {now.num_rows} rows, there were {was.num_rows}"
    elif was.in_any_order == now.in_any_order and was.fingerprint != now.fingerprint:
        yield "they are the same rows in another order"
    if first := _first_difference(was, now):
        yield first


def _first_difference(was: DataRecord, now: DataRecord) -> str | None:
    """Say between which rows the first change lies; nothing where rows were added at the end."""
    if was.num_rows != now.num_rows:
        return None
    for part, before, after in zip(_blocks(now.num_rows), was.blocks, now.blocks, strict=False):
        if before != after:
            rows = f"row {part.start}" if part.stop == part.start + 1 else _span(part)
            return f"the first that differs is {rows}, counted from 0 behind the length filter"
    return None


def _span(part: slice) -> str:
    return f"one of rows {part.start} to {part.stop - 1}"


def _blocks(count: int) -> list[slice]:
    size = -(-count // _NUM_BLOCKS) or 1
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _hash(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint that will be gone on from; of a damaged one the rows are the run's as well."""
    match config.trainer.resume_mode:
        case "disable":
            return None
        case "auto":
            return next((path for _, path in newest_first(checkpoint_folder(config))), None)
        case "resume_path":
            return config.trainer.resume_from_path


def _read(path: Path) -> DataRecord | None:
    """Read a record; what cannot be read here is told where the whole checkpoint is read."""
    try:
        return DataRecord(**json.loads((path / STATE).read_bytes())["data"][RECORD])
    except (OSError, ValueError, KeyError, TypeError):
        return None
