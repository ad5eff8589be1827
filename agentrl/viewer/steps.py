"""Describe the trajectories of one step: distributions, groups, slow requests, failures."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from agentrl.viewer.index import Entry, FileIndex
from agentrl.viewer.runs import RunReader

NUM_BINS = 24


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
        "summary": list(_summarize(entries)),
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
    """Describe the calls of each tool; the tool that took the most time is first."""
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        for name, outcome, queued, worked in entry.calls:
            outcomes[name][outcome] += 1
            times[name].append((queued, worked))
    rows = [
        {
            "tool": name,
            "calls": counts.total(),
            "outcomes": counts.most_common(),
            "queue_s": float(np.mean([queued for queued, _ in times[name]])),
            "work_s": float(np.mean([worked for _, worked in times[name]])),
            "max_work_s": max(worked for _, worked in times[name]),
            "total_s": sum(queued + worked for queued, worked in times[name]),
        }
        for name, counts in sorted(outcomes.items())
    ]
    return sorted(rows, key=lambda row: -row["total_s"])


def _summarize(entries: Sequence[Entry]) -> Iterator[tuple[str, float]]:
    """Yield the figures in which two steps are compared: means, and shares between 0 and 1."""
    if not entries:
        return
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for entry in entries:
        if entry.reward is not None:
            by_source[entry.source].append(entry.reward)
    rewards = [reward for values in by_source.values() for reward in values]
    if rewards:
        yield "reward", float(np.mean(rewards))
    if len(by_source) > 1:
        for source, values in sorted(by_source.items()):
            yield f"reward of {source}", float(np.mean(values))
    yield "response tokens", float(np.mean([one.tokens for one in entries]))
    yield "turns", float(np.mean([one.turns for one in entries]))
    yield "tool calls", float(np.mean([len(one.calls) for one in entries]))
    yield "seconds", float(np.mean([one.seconds for one in entries]))
    for end, count in Counter(one.end or "none" for one in entries).items():
        yield f"end {end}, share", count / len(entries)
    for row in _tool_rows(entries):
        name, num_ok = row["tool"], dict(row["outcomes"]).get("ok", 0)
        yield f"{name or 'no name'}: calls", row["calls"]
        if not name:  # calls that are malformed
            continue
        yield f"{name}: calls that are not ok, share", 1 - num_ok / row["calls"]
        yield f"{name}: seconds at work of a call", row["work_s"]


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
