"""Answer queries about whole runs: their curves, and lists of trajectories with filters.

`steps.py` describes one step, `trajectories.py` one trajectory.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, ge, lt
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.viewer.index import Entry, FileIndex
from agentrl.viewer.runs import RunReader, find_differences
from agentrl.viewer.steps import MAX_TOOLS

_SORTS = (
    *("id", "reward", "tokens", "turns", "seconds", "calls", "tool_seconds", "step", "end"),
    *("source", "trained"),
)
_HIDDEN = ("step", "source")
"""Columns that a list hides if they have one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which trajectories a list shows, and in which order.

    Raises:
        DataError: If the order is unknown.
    """

    file: str = ""
    """Label of a file; empty: all files."""
    end: str = ""
    """Stop reason."""
    tool: str = ""
    """Name of a tool that was called."""
    outcome: str = ""
    """Outcome of a call (of that tool, if one is given)."""
    source: str = ""
    uid: str = ""
    text: str = ""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    """Trajectories with this reward are left out, as in the bins of a histogram."""
    sort: str = ""
    """One of the columns of the list; a leading `-` reverses it. Empty: order of the files."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Filters":
        """Read the parameters of a query.

        Raises:
            DataError: If a number is not valid.
        """
        texts = ("file", "end", "tool", "outcome", "source", "uid", "text", "sort")
        values: dict[str, Any] = {key: query.get(key, "") for key in texts}
        for key in ("min_reward", "max_reward"):
            if query.get(key):
                values[key] = read_number(query, key)
        return cls(**values)

    def __post_init__(self) -> None:
        if self.sort.removeprefix("-") not in ("", *_SORTS):
            raise DataError(f"unknown order {self.sort!r}", expected=", ".join(_SORTS))

    def select(self, index: FileIndex) -> list[Entry]:
        """Return the trajectories of a file that a list with these filters has."""
        found = index.entries
        for column, wanted in (("end", self.end), ("source", self.source), ("uid", self.uid)):
            if wanted:
                found = [one for one in found if getattr(one, column) == wanted]
        if self.tool or self.outcome:
            found = [one for one in found if any(map(self._is_asked, one.calls))]
        for compare, limit in ((ge, self.min_reward), (lt, self.max_reward)):
            if abs(limit) < math.inf:
                found = [
                    one for one in found if one.reward is not None and compare(one.reward, limit)
                ]
        if text := self.text.lower():
            found = [one for one in found if index.contains(one, text)]
        return found

    def tool_seconds(self, entry: Entry) -> float:
        """Return the sum of the seconds at work of a trajectory's calls, or of `tool`'s calls."""
        return sum(worked for name, _, _, worked in entry.calls if self.tool in ("", name))

    def _is_asked(self, call: tuple[str, str, float, float]) -> bool:
        return self.tool in ("", call[0]) and self.outcome in ("", call[1])


def read_number(query: Mapping[str, str], key: str, default: float = 0) -> float:
    """Read a number of a query.

    Raises:
        DataError: If it is not a number.
    """
    try:
        return float(query.get(key) or default)
    except ValueError:
        raise DataError(f"{key} is {query[key]!r}", expected="a number") from None


def list_runs(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Describe all runs, and the keys in which their configurations differ."""
    rows = []
    for number, run in enumerate(runs):
        metrics, indexed = run.metrics(), run.indexed()
        labels = [{"label": label, "is_indexed": label in indexed} for label in run.find_files()]
        rows.append(
            {
                "run": number,
                "name": run.name,
                "folder": str(run.folder),
                "state": run.state,
                "step": metrics[-1].get("step") if metrics else None,
                "num_lines": len(metrics),
                "names": sorted({key for line in metrics for key in line} - {"step"}),
                "files": labels,
                "rollout_folder": run.rollout_folder,
            }
        )
    differences = find_differences([run.recorded_config for run in runs]) if len(runs) > 1 else []
    return {"runs": rows, "differences": differences}


def read_curve(run: RunReader, name: str) -> dict[str, Any]:
    """Return the values of a metric, and the index of the line of `metrics.jsonl` of each."""
    lines = [(at, line[name]) for at, line in enumerate(run.metrics()) if name in line]
    return {"at": [at for at, _ in lines], "y": [value for _, value in lines]}


def read_axes(run: RunReader) -> dict[str, list[float]]:
    """Return what curves are drawn over, for each line of `metrics.jsonl`.

    `step`; `time` (seconds) and `tokens` of all steps so far; `trained`: trained tokens of all
    steps so far, from the saved rollouts that are indexed. An axis without values is empty.
    """
    metrics, trained = run.metrics(), _trained_by_step(run)
    steps = [line.get("step", 0) for line in metrics]
    by_line = {
        "time": [line.get("timing_s/step") or 0.0 for line in metrics],
        "tokens": [line.get("perf/total_num_tokens") or 0.0 for line in metrics],
        "trained": [trained.get(step, 0) for step in steps],
    }
    sums = {name: np.cumsum(values).tolist() for name, values in by_line.items() if any(values)}
    return {"step": steps, "time": [], "tokens": [], "trained": [], **sums}


def _trained_by_step(run: RunReader) -> dict[int, int]:
    found: Counter[int] = Counter()
    for label, index in run.indexed().items():
        if label.rpartition("/")[2].startswith("step_") and not label.startswith("skipped/"):
            for entry in index.entries:
                found[entry.step] += entry.trained
    return found


def _in_order(
    found: list[Entry], filters: Filters, advantage_of: Callable[[Entry], float | None]
) -> list[Entry]:
    """Sort by a column; missing values are last in both directions.

    Of equal rewards, a lower advantage is lower.
    """
    order, column = filters.sort, filters.sort.removeprefix("-")
    if column in ("", "id"):
        return found
    getters: dict[str, Callable[[Entry], Any]] = {
        "calls": lambda entry: len(entry.calls),
        "tool_seconds": filters.tool_seconds,
    }
    value_of, is_reversed = getters.get(column, attrgetter(column)), order.startswith("-")
    known = [one for one in found if value_of(one) == value_of(one) is not None]
    missing = [one for one in found if value_of(one) is None or value_of(one) != value_of(one)]
    key = value_of
    if column == "reward":
        last = -math.inf if is_reversed else math.inf
        key = lambda entry: rank_by_reward(entry, advantage_of(entry), last)  # noqa: E731
    return [*sorted(known, key=key, reverse=is_reversed), *missing]


def rank_by_reward(
    entry: Entry, advantage: float | None, last: float = math.inf
) -> tuple[float | None, float]:
    """Return the key by which trajectories are sorted from the worst to the best.

    Args:
        entry: The trajectory.
        advantage: Its advantage, which orders those with equal rewards.
        last: Stands for an unknown advantage.
    """
    return entry.reward, last if advantage is None or math.isnan(advantage) else advantage


def list_trajectories(
    run: RunReader, filters: Filters, *, offset: int = 0, limit: int = 50
) -> dict[str, Any]:
    """Return a page of a list, and how many files and damaged lines there are.

    Of all files, only indexed ones are searched.

    Raises:
        LookupError: If there is no such file.
    """
    files = run.find_files()
    if filters.file:
        run.index(filters.file, files.get(filters.file))
    indexed = run.indexed(files)
    listed = {filters.file: indexed[filters.file]} if filters.file else indexed
    selected = [entry for index in listed.values() for entry in filters.select(index)]

    def advantage_of(entry: Entry) -> float | None:
        return listed[entry.id.rpartition(":")[0]].advantages.get(entry.request_id)

    found = _in_order(selected, filters, advantage_of)
    rows = [
        {
            **entry.shown(),
            "advantage": advantage_of(entry),
            "tool_seconds": filters.tool_seconds(entry),
        }
        for entry in found[offset : offset + limit]
    ]
    return {
        "total": len(found),
        "offset": offset,
        "rows": rows,
        "files": len(files),
        "indexed": len(indexed),
        "hidden": [name for name in _HIDDEN if len({getattr(one, name) for one in found}) < 2],
        "damaged": sum(len(index.damaged) for index in listed.values()),
    }


def list_choices(run: RunReader, file: str = "") -> dict[str, Any]:
    """Return the values that the filters may have: of each, the 50 that are the most frequent."""
    indexes = [run.index(file)] if file else list(run.indexed().values())
    entries = [entry for index in indexes for entry in index.entries]
    calls = [call for entry in entries for call in entry.calls]
    return {
        "ends": _most_common(entry.end for entry in entries),
        "tools": _most_common(call[0] for call in calls if call[0]),
        "outcomes": _most_common(call[1] for call in calls),
        "sources": _most_common(entry.source for entry in entries),
    }


def _most_common(values: Iterable[str]) -> list[str]:
    return sorted(value for value, _ in Counter(values).most_common(MAX_TOOLS))


def to_json(value: Any) -> str:
    """Write JSON for a browser; numbers that are not finite become strings: `nan`, `inf`."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
