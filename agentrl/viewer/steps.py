"""Describe the trajectories of one step: distributions, groups, slow requests, failures."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from agentrl.viewer.index import Entry, FileIndex
from agentrl.viewer.runs import RunReader

NUM_BINS = 24
MAX_TOOLS = 50
"""Tools that are listed: the policy may call any name."""
_MAX_GROUPS = 200
_MAX_WHOLE = 1e9
_LARGEST = 1e300
"""Larger values are counted as this one, so that differences and sums are finite."""


def describe_step(run: RunReader, label: str) -> dict[str, Any]:
    """Return distributions, groups, slow requests and failures of one file."""
    with np.errstate(over="ignore", invalid="ignore"):  # rewards may be of any size
        return _describe(run.index(label), label)


def _describe(index: FileIndex, label: str) -> dict[str, Any]:
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
        "groups": groups[:_MAX_GROUPS],
        "num_groups": len(groups),
        "summary": list(_summarize(entries)),
        "slowest": [entry.shown() for entry in sorted(entries, key=lambda one: -one.seconds)[:10]],
        "failures": _failures(entries),
    }


def histogram(values: Sequence[float | None]) -> dict[str, Any]:
    """Count values in bins of equal width; whole numbers of a small range have a bin each."""
    known = np.array([value for value in values if value is not None], dtype=float)
    known = np.clip(known[np.isfinite(known)], -_LARGEST, _LARGEST)
    missing = len(values) - len(known)
    if not len(known):
        return {"edges": [], "counts": [], "missing": missing}
    low, high = float(known.min()), float(known.max())
    is_whole = bool((known == np.round(known)).all()) and high - low < NUM_BINS
    is_whole = is_whole and max(abs(low), abs(high)) < _MAX_WHOLE
    widest = high if high > low else low + max(1.0, abs(low) * 1e-6)
    edges = np.arange(low, high + 2) - 0.5 if is_whole else np.linspace(low, widest, NUM_BINS + 1)
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
    """Describe the calls of each tool; the tool that took the most time is first.

    The tools after the first `MAX_TOOLS` are one row, whose `tool` is None.
    """
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        for name, outcome, queued, worked in entry.calls:
            outcomes[name][outcome] += 1
            times[name].append((queued, worked))
    ranked = sorted(outcomes, key=lambda name: (-sum(map(sum, times[name])), name))
    rows = [_tool_row(name, outcomes[name], times[name]) for name in ranked[:MAX_TOOLS]]
    if others := ranked[MAX_TOOLS:]:
        counts = sum((outcomes[name] for name in others), Counter[str]())
        rows.append(_tool_row(None, counts, [one for name in others for one in times[name]]))
    return rows


def _tool_row(
    name: str | None, outcomes: Counter[str], times: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    queued, worked = zip(*times, strict=True)
    return {
        "tool": name,
        "calls": outcomes.total(),
        "outcomes": outcomes.most_common(),
        "queue_s": float(np.mean(queued)),
        "work_s": float(np.mean(worked)),
        "max_work_s": max(worked),
        "total_s": sum(queued) + sum(worked),
    }


def tool_name(name: str | None) -> str:
    """Return the text for the `tool` of a row: it is empty for calls that are malformed."""
    return "other tools" if name is None else name or "no name"


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
        yield f"{tool_name(name)}: calls", row["calls"]
        if not name:  # calls that are malformed, and other tools
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
