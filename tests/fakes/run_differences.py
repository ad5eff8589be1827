"""Compare the outputs of two runs bit by bit, without clocks."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.trainer.rollouts.line_files import LineReader

CLOCKS_OF_METRICS = re.compile(
    r"timing_s/.*|weight_sync/seconds|reward/seconds/.*|"
    r"perf/(throughput|time_per_step|max_.*|tokens_per_s/.*|mfu/.*|idle/.*)|"
    r"rollout/(turn_seconds|tool/.*/(queue_)?seconds)/.*"
)
"""Metrics of time or of the process's memory; all others are compared."""
CLOCKS_OF_RECORDS = re.compile(r"(queue_)?seconds(_.*)?|started_as")
"""Keys of rollouts, `summary.json` and `state.json` with seconds or with the number of a start."""
APART = re.compile(r"metrics\.\d+\.jsonl|started|starts/.*|(.*/)?(manifest\.json|digests\.jsonl)")
"""Files that are not compared: metrics of an attempt without a checkpoint, the date, the record of
each start, and checksums (one is of a file with seconds; the files themselves are compared)."""

LINES = re.compile(r".*\.jsonl(\.zst)?")


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the differences of two run folders; none if the runs are the same."""
    left, right = _names(ours), _names(theirs)
    found = [f"only one run has {name}" for name in sorted(left ^ right)]
    for name in sorted(left & right):
        found += [f"{name}: {what}" for what in _compare(ours / name, theirs / name, ours, theirs)]
    return found


def _names(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in files}
    return {name for name in names if not APART.fullmatch(name)}


def _compare(ours: Path, theirs: Path, *folders: Path) -> Iterator[str]:
    if ours.name not in ("state.json", "summary.json") and not LINES.fullmatch(ours.name):
        if ours.read_bytes() != theirs.read_bytes():
            yield "other bytes"
        return
    left, right = _records(ours, folders), _records(theirs, folders)
    if len(left) != len(right):
        yield f"{len(left)} and {len(right)} lines"
    for line, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        clocks = CLOCKS_OF_METRICS if ours.name == "metrics.jsonl" else CLOCKS_OF_RECORDS
        for what in _compare_values(_timeless(one, clocks), _timeless(other, clocks), ""):
            yield f"line {line}{what}"


def _records(file: Path, folders: Iterable[Path]) -> list[Any]:
    with LineReader(file) as reader:
        text = reader.read().decode()
    for folder in folders:
        text = text.replace(f"{folder}/", "RUN/")
    if LINES.fullmatch(file.name):
        return [json.loads(line) for line in text.splitlines()]
    return [json.loads(text)]


def _timeless(value: Any, clocks: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        kept = {name: v for name, v in value.items() if not clocks.fullmatch(name)}
        return {name: _timeless(v, clocks) for name, v in kept.items()}
    if isinstance(value, list):
        return [_timeless(one, clocks) for one in value]
    return value


def _compare_values(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _compare_values(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _compare_values(*pair, f"{where}[{index}]")
    elif one != other:
        yield f"{where}: {str(one)[:80]} and {str(other)[:80]}"
