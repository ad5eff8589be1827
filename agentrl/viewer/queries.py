"""What the pages and the terminal ask of runs: lists, curves, a step, a trajectory, its tokens."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.viewer.index import Entry, FileIndex, read_token_rows
from agentrl.viewer.runs import RunReader, find_differences

NUM_BINS = 24
MAX_TOKENS = 500
"""Tokens of one answer."""
_SORTS = ("id", "reward", "tokens", "turns", "seconds", "calls", "step", "end", "source", "trained")
_TOKEN_COLUMNS = (
    "response_mask", "old_log_probs", "entropies", "ref_log_prob", "values", "token_level_scores",
    "token_level_rewards", "advantages", "returns", "rollout_is_weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which trajectories a list shows, and in which order."""

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
    sort: str = ""
    """One of the columns of the list; a leading `-` reverses it. Empty: order of the files."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Filters":
        """Read the parameters of a query.

        Raises:
            DataError: If a number or the order is not valid.
        """
        texts = ("file", "end", "tool", "outcome", "source", "uid", "text", "sort")
        values: dict[str, Any] = {key: query.get(key, "") for key in texts}
        for key in ("min_reward", "max_reward"):
            if query.get(key):
                values[key] = read_number(query, key)
        if values["sort"].removeprefix("-") not in ("", *_SORTS):
            raise DataError(f"unknown order {values['sort']!r}", expected=", ".join(_SORTS))
        return cls(**values)

    def match(self, index: FileIndex, entry: Entry) -> bool:
        """Return whether a list with these filters has the trajectory."""
        wanted = ((self.end, entry.end), (self.source, entry.source), (self.uid, entry.uid))
        if any(want and want != got for want, got in wanted):
            return False
        if self.tool or self.outcome:
            asked = (self.tool, self.outcome)
            if not any(
                all(not want or want == got for want, got in zip(asked, call, strict=False))
                for call in entry.calls
            ):
                return False
        if self.min_reward > -math.inf or self.max_reward < math.inf:
            reward = math.nan if entry.reward is None else entry.reward
            if not self.min_reward <= reward <= self.max_reward:
                return False
        return not self.text or index.contains(entry, self.text.lower())


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
        metrics, files = run.metrics(), run.find_files()
        labels = [{"label": label, "is_indexed": label in run.indexed()} for label in files]
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
                "has_tokenizer": run.tokenizer is not None,
            }
        )
    differences = find_differences([run.config for run in runs]) if len(runs) > 1 else []
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


def select(run: RunReader, filters: Filters) -> list[tuple[FileIndex, Entry]]:
    """Return the trajectories of a list, in order. Of all files, only indexed ones are searched."""
    indexes = [run.index(filters.file)] if filters.file else list(run.indexed().values())
    found = [
        (index, entry)
        for index in indexes
        for entry in index.entries
        if filters.match(index, entry)
    ]
    column = filters.sort.removeprefix("-")
    if column and column != "id":
        is_reversed = filters.sort.startswith("-")
        found.sort(key=lambda pair: _sort_key(pair[1], column, is_reversed), reverse=is_reversed)
    return found


def _sort_key(entry: Entry, column: str, is_reversed: bool) -> tuple[bool, Any]:
    """Return the key of an order in which missing values are last."""
    value = len(entry.calls) if column == "calls" else getattr(entry, column)
    is_missing = value is None or value != value
    return is_missing is not is_reversed, 0 if is_missing else value


def list_trajectories(
    run: RunReader, filters: Filters, *, offset: int = 0, limit: int = 50
) -> dict[str, Any]:
    """Return a page of a list, and the values that filters may have."""
    found = select(run, filters)
    page = found[offset : offset + limit]
    rows = [
        {**entry.shown(), "advantage": index.advantages.get(entry.request_id)}
        for index, entry in page
    ]
    files = run.find_files()
    return {
        "total": len(found),
        "offset": offset,
        "rows": rows,
        "files": len(files),
        "indexed": len(run.indexed()),
        "damaged": sum(len(index.damaged) for index in run.indexed().values()),
    }


def list_choices(run: RunReader, file: str = "") -> dict[str, Any]:
    """Return the values that the filters may have."""
    indexes = [run.index(file)] if file else list(run.indexed().values())
    entries = [entry for index in indexes for entry in index.entries]
    return {
        "ends": sorted({entry.end for entry in entries}),
        "tools": sorted({call[0] for entry in entries for call in entry.calls}),
        "outcomes": sorted({call[1] for entry in entries for call in entry.calls}),
        "sources": sorted({entry.source for entry in entries}),
    }


# A step


def describe_step(run: RunReader, label: str, *, max_groups: int = 200) -> dict[str, Any]:
    """Return distributions, groups, slow requests and failures of one file."""
    index = run.index(label)
    entries = index.entries
    ends = Counter(entry.end for entry in entries)
    groups = _groups(index)
    return {
        "label": label,
        "num": len(entries),
        "damaged": index.damaged,
        "histograms": [
            {"name": "reward", "unit": "", **histogram([one.reward for one in entries])},
            {"name": "response", "unit": "tokens", **histogram([one.tokens for one in entries])},
            {"name": "turns", "unit": "turns", **histogram([one.turns for one in entries])},
            {"name": "duration", "unit": "s", **histogram([one.seconds for one in entries])},
        ],
        "ends": ends.most_common(),
        "tools": _tool_rows(entries),
        "groups": groups[:max_groups],
        "num_groups": len(groups),
        "slowest": [entry.shown() for entry in sorted(entries, key=lambda one: -one.seconds)[:10]],
        "failures": _failures(entries),
    }


def histogram(values: Sequence[float | None]) -> dict[str, Any]:
    """Count values in bins of equal width; whole numbers of a small range have a bin each."""
    known = np.array([value for value in values if value is not None], dtype=float)
    known = known[np.isfinite(known)]
    missing = len(values) - len(known)
    if not len(known):
        return {"edges": [], "counts": [], "missing": missing}
    low, high = float(known.min()), float(known.max())
    is_whole = bool((known == np.round(known)).all()) and high - low < NUM_BINS
    edges = (
        np.arange(low, high + 2) - 0.5
        if is_whole
        else np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)
    )
    counts = np.histogram(known, edges)[0]
    quantiles = np.quantile(known, [0.5, 0.95])
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "missing": missing,
        "is_whole": is_whole,
        "mean": float(known.mean()),
        "min": low,
        "median": float(quantiles[0]),
        "p95": float(quantiles[1]),
        "max": high,
    }


def _tool_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        for name, outcome, queued, worked in entry.calls:
            outcomes[name][outcome] += 1
            times[name].append((queued, worked))
    return [
        {
            "tool": name,
            "calls": counts.total(),
            "outcomes": counts.most_common(),
            "queue_s": float(np.mean([queued for queued, _ in times[name]])),
            "work_s": float(np.mean([worked for _, worked in times[name]])),
            "max_work_s": max(worked for _, worked in times[name]),
        }
        for name, counts in sorted(outcomes.items())
    ]


def _groups(index: FileIndex) -> list[dict[str, Any]]:
    by_uid: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in index.entries:
        by_uid[entry.uid].append(entry)
    rows = []
    for uid, members in by_uid.items():
        rewards = [one.reward for one in members if one.reward is not None]
        samples = [
            {
                "id": one.id,
                "reward": one.reward,
                "advantage": index.advantages.get(one.request_id),
                "end": one.end,
                "is_failed": one.state == "failed",
            }
            for one in sorted(members, key=lambda one: one.sample)
        ]
        mean = sum(rewards) / len(rewards) if rewards else None
        spread = max(rewards) - min(rewards) if rewards else 0.0
        rows.append({"uid": uid, "mean": mean, "spread": spread, "samples": samples})
    rows.sort(key=lambda row: -row["spread"])
    return rows


def _failures(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    found: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.state == "failed":
            found[entry.fault, entry.message].append(entry)
    rows = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        {"fault": fault, "message": message[:500], "num": len(members), "id": members[0].id}
        for (fault, message), members in rows[:50]
    ]


# A trajectory


def describe_trajectory(run: RunReader, entry_id: str) -> dict[str, Any]:
    """Return the conversation, turns, rewards and neighbors of a trajectory."""
    index, entry = run.entry(entry_id)
    saved = index.read(entry)
    request = saved["request"]
    sequences = [*request["branches"], request]
    group = sorted((e for e in index.entries if e.uid == entry.uid), key=lambda e: e.sample)
    ranked = sorted(
        (one for one in index.entries if one.reward is not None and one.reward == one.reward),
        key=lambda one: (one.reward, one.offset),
    )
    rank = next((i for i, one in enumerate(ranked) if one.id == entry.id), None)
    place = index.entries.index(entry)
    around = {
        "worse": ranked[rank - 1].id if rank else None,
        "better": ranked[rank + 1].id if rank is not None and rank + 1 < len(ranked) else None,
        "previous": index.entries[place - 1].id if place else None,
        "next": index.entries[place + 1].id if place + 1 < len(index.entries) else None,
    }
    rewards = ("reward", "agent_reward", "rm_score", "tool_rewards", "reward_extra_info")
    return {
        **entry.shown(),
        "advantage": index.advantages.get(entry.request_id),
        "file": entry.id.rpartition(":")[0],
        "messages": request["messages"],
        "sequences": [_describe_sequence(one) for one in sequences],
        "rewards": {"combined_reward": entry.reward} | {key: request.get(key) for key in rewards},
        "ground_truth": request["ground_truth"],
        "dropped": request.get("dropped"),
        "error": request["error"],
        "around": around,
        "group": [one.shown() for one in group],
        "same_row": [one.shown() for one in _same_row(run, entry)],
        "has_tokenizer": run.tokenizer is not None,
    }


def _describe_sequence(request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "request_id": request["request_id"],
        "cause": request.get("branch_cause"),
        "messages": request["messages"],
        "turns": request["turns"],
        "num_prompt_tokens": len(request["prompt_ids"]),
        "num_tokens": len(request["response_ids"]),
    }


def _same_row(run: RunReader, entry: Entry) -> list[Entry]:
    kind = entry.id.rpartition("_")[0]
    found = [
        one
        for index in run.indexed().values()
        for one in index.entries
        if one.row == entry.row and one.step != entry.step and one.id.rpartition("_")[0] == kind
    ]
    return sorted(found, key=lambda one: (one.step, one.sample))[:100]


def list_tokens(
    run: RunReader, entry_id: str, *, sequence: int = -1, start: int = 0
) -> dict[str, Any]:
    """Return at most `MAX_TOKENS` response tokens of one sequence, with all that is known of each.

    Args:
        run: The run.
        entry_id: The trajectory.
        sequence: Index of the sequence; -1 for the last one.
        start: Index of the first token.
    """
    index, entry = run.entry(entry_id)
    request = index.read(entry)["request"]
    one = [*request["branches"], request][sequence]
    ids, end = one["response_ids"], start + MAX_TOKENS
    trained = [
        row
        for row in read_token_rows(index.path, [one["request_id"]])
        if len(row["response_mask"]) == len(ids)
    ]
    columns: dict[str, list[Any]] = {
        "id": ids[start:end],
        "mask": one["loss_mask"][start:end],
        "rollout_log_probs": one["rollout_log_probs"][start:end],
    }
    for name in _TOKEN_COLUMNS:
        values = trained[0].get(name) if trained else None
        if values is not None:
            columns[name] = values[start:end]
    if "old_log_probs" in columns:
        columns["ratio"] = [
            math.exp(min(old - new, 50)) if is_one else None
            for old, new, is_one in zip(
                columns["old_log_probs"], columns["rollout_log_probs"], columns["mask"], strict=True
            )
        ]
    columns["version"] = list(_versions(one["turns"], start, min(end, len(ids))))
    tokenizer = run.tokenizer
    if tokenizer is not None:
        columns["text"] = [
            tokenizer.decode([token], skip_special_tokens=False) for token in columns["id"]
        ]
    turns = [
        {"role": turn["role"], "start": turn["start"], "end": turn["end"]} for turn in one["turns"]
    ]
    return {
        "start": start,
        "num": len(ids),
        "columns": columns,
        "turns": turns,
        "has_training": bool(trained),
    }


def _versions(turns: Sequence[Mapping[str, Any]], start: int, end: int) -> Iterator[int | None]:
    known = {
        turn["start"] + position: version
        for turn in turns
        for version, first, last in turn["weight_versions"]
        for position in range(first, last)
        if start <= turn["start"] + position < end
    }
    return (known.get(position) for position in range(start, end))


def to_json(value: Any) -> str:
    """Write JSON for a browser; numbers that are not finite become strings (`NaN`)."""
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
