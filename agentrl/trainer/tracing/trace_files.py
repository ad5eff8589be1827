"""Traces as JSON of the Trace Event Format, which Perfetto and `chrome://tracing` open.

A process is a rank. Its first track has the phases of the training step. Each further track has the
requests of one slot, one after another: a rollout has as many slots as requests ran at once. Slices
on a track must nest, so calls that ran at the same time get tracks of their own next to it.

Source: "Trace Event Format" (Google, 2016): complete events (`ph: X`) with `ts` and `dur` in
microseconds, metadata events (`ph: M`) with the names and the order of processes and tracks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.atomic_io import atomic_file
from agentrl.messages import dump_json
from agentrl.trainer.tracing.spans import Span, Trace

_STEP = -1
"""The slot of the track of the training step."""


class _Track(NamedTuple):
    """Tracks are shown in this order."""

    rank: int
    slot: int
    lane: int
    """0, or the number of an additional track for what overlaps."""

    @property
    def name(self) -> str:
        if self.slot == _STEP:
            return "training step"
        return f"requests {self.slot}" + (f", parallel {self.lane}" if self.lane else "")


class _Placed(NamedTuple):
    track: _Track
    span: Span
    trace_id: str


def save_trace_file(path: Path, traces: Sequence[Trace]) -> None:
    """Write traces to a file that appears when it is complete.

    Raises:
        OSError: naming `path`, if it cannot be written.
    """
    with atomic_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for index, event in enumerate(trace_events(traces)):
            # Each event by itself: encoding all at once would stop the other threads.
            file.write((",\n" if index else "") + dump_json(event))
        file.write("\n]}\n")


def trace_events(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Yield the metadata events, then an event for each span; a parent is before its children."""
    placed = [*_place(traces)]
    ids = {track: number for number, track in enumerate(sorted({one.track for one in placed}), 1)}
    for rank in sorted({track.rank for track in ids}):
        yield _metadata("process_name", rank, 0, name=f"rank {rank}")
    for track, tid in ids.items():
        yield _metadata("thread_name", track.rank, tid, name=track.name)
        yield _metadata("thread_sort_index", track.rank, tid, sort_index=tid)
    for track, span, trace_id in placed:
        start, end = round(span.started * 1e6), round(span.ended * 1e6)
        error = {"error": span.error} if span.error else {}
        yield {
            "name": str(span.attributes.get("gen_ai.tool.name", span.name)),
            "cat": span.name,
            "ph": "X",
            "ts": start,
            "dur": end - start,
            "pid": track.rank,
            "tid": ids[track],
            "args": {"trace_id": trace_id, **span.attributes, **error},
        }


def _metadata(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _place(traces: Sequence[Trace]) -> Iterator[_Placed]:
    """Place every span on a track on which it overlaps nothing but its parents and children."""
    slots: defaultdict[int, list[float]] = defaultdict(list)
    for trace in sorted(traces, key=lambda one: one.root.started):
        root, rank = trace.root, trace.rank
        slot = _STEP if root.name == "step" else _take_free(slots[rank], root.started, root.ended)
        lanes: list[list[Span]] = []
        for lane, span in _place_children(root, 0, lanes):
            yield _Placed(_Track(rank, slot, lane), span, trace.trace_id)


def _take_free(ends: list[float], started: float, ended: float) -> int:
    """Return the first slot whose last request has ended, and use it until `ended`."""
    for slot, free in enumerate(ends):
        if free <= started:
            ends[slot] = ended
            return slot
    ends.append(ended)
    return len(ends) - 1


def _place_children(span: Span, lane: int, lanes: list[list[Span]]) -> Iterator[tuple[int, Span]]:
    yield lane, span
    free = span.started
    for child in span.children:
        if child.started >= free:
            free = child.ended
            yield from _place_children(child, lane, lanes)
        else:
            yield from _place_children(child, _take_lane(child, lanes), lanes)


def _take_lane(span: Span, lanes: list[list[Span]]) -> int:
    """Return the number, from 1, of a lane on which the span overlaps no other."""
    for number, used in enumerate(lanes, 1):
        if not _overlaps(span, used):
            used.append(span)
            return number
    lanes.append([span])
    return len(lanes)


def _overlaps(span: Span, others: Iterable[Span]) -> bool:
    return any(span.started < one.ended and one.started < span.ended for one in others)
