"""Derive a trajectory's time line of states from what its saved request recorded.

A lane is a list of bars that do not overlap: the states of the request, those of sub-agents and of
parallel sequences, and tool calls. A bar is `(kind, start, seconds, note)`, its start in seconds
after that of the request. The time of the request that no record explains is of kind `other`.

A saved turn has the time of waiting for the engine, the tools or the interaction. It does not have
the time in the engine's queue; and of a request's wait for a free slot of the rollout, which is
before its start, nothing is saved.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_STATE_OF_ROLE = {"assistant": "running", "tool": "tool_calling", "user": "interacting"}
_MAX_LANES = 24
"""Lanes of tool calls that are shown."""
_SHORTEST_GAP_S = 1e-4
_LONGEST = 1e12
"""A larger number is no time."""
NO_CLOCK = "when turns began was not recorded: they are drawn one after another"


class Bar(NamedTuple):
    """A state or a part of a tool call, from its start."""

    kind: str
    """`pending`, `running`, `tool_calling`, `interacting`, `scoring`, `other`; `queue`, `work`."""
    start: float
    seconds: float
    note: str = ""

    @property
    def end(self) -> float:
        """The second at which it ends."""
        return self.start + self.seconds


class _Timed(NamedTuple):
    """A sequence, and for each of its turns the second at which the turn began."""

    sequence: Mapping[str, Any]
    starts: Sequence[float]
    origin: float | None
    """Unix time at which the request began; None: unknown."""

    def states(self) -> Iterator[Bar]:
        """Yield the states that the turns recorded."""
        turns, cause = self.sequence["turns"], self.sequence.get("branch_cause")
        of = f" ({str(cause)[:100]})" if cause else ""
        for number, (turn, start) in enumerate(zip(turns, self.starts, strict=True)):
            if seconds := _number(turn["seconds"]):
                kind = _STATE_OF_ROLE.get(turn["role"], "other")
                yield Bar(kind, start, seconds, f"turn {turn['index']}{of}")
            # Without a turn of results, as if a tool ended the request, the calls have the time.
            is_answered = [one["role"] for one in turns[number + 1 : number + 2]] == ["tool"]
            calls = [] if is_answered else list(self._calls_of(turn, start))
            if calls:
                first = min(bars[0].start for bars in calls)
                last = max(bars[-1].end for bars in calls)
                yield Bar("tool_calling", first, last - first, f"calls of turn {turn['index']}{of}")

    def calls(self) -> Iterator[list[Bar]]:
        """Yield the time in queues and at work of each executed call."""
        for turn, start in zip(self.sequence["turns"], self.starts, strict=True):
            yield from self._calls_of(turn, start)

    def _calls_of(self, turn: Mapping[str, Any], start: float) -> Iterator[list[Bar]]:
        for call in turn["calls"]:
            began, queued, worked = (
                _number(call.get(key)) for key in ("seconds_started", "queue_seconds", "seconds")
            )
            if not began and not worked:
                continue  # not executed
            if began and self.origin is not None:
                at = max(0.0, began - self.origin)
            else:
                at = start + _number(turn["seconds"])
            name = f"{call['name'][:100] or 'no name'}, {call['outcome'][:100]}"
            bars = [Bar("queue", at, queued, name), Bar("work", at + queued, worked, name)]
            yield bars if queued else bars[1:]


def describe_timeline(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lanes of a trajectory's time line, the sum of each kind, and notes.

    Args:
        request: A saved request, with its branches.
    """
    metrics, sequences = request["metrics"], [*request["branches"], request]
    origin = _find_origin(metrics, sequences)
    timed = _place_turns(sequences, origin)
    states = _pack((list(one.states()) for one in timed), main=len(timed) - 1)
    calls = _pack(bars for one in timed for bars in one.calls())
    main = sorted(states[0], key=lambda bar: bar.start)
    ended = max([_number(metrics.get("seconds")), *(bar.end for bar in main)])
    if origin is not None and (first := min((bar.start for bar in main), default=ended)) > 0:
        main.insert(0, Bar("pending", 0.0, first, "before the first turn"))
    scored = metrics.get("seconds_reward_started")
    if origin is not None and scored is not None:
        start = _number(scored) - origin
        main.append(Bar("scoring", max(start, 0.0), _number(metrics.get("seconds_reward"))))
    states[0] = list(_fill_gaps(main, ended))
    lanes = [*states, *calls[:_MAX_LANES]]
    totals: defaultdict[str, float] = defaultdict(float)
    for bar in (bar for lane in (*states, *calls) for bar in lane):
        totals[bar.kind] += bar.seconds
    return {
        "seconds": max([ended, 1e-9, *(bar.end for lane in lanes for bar in lane)]),
        "ended": ended,
        "states": states,
        "calls": calls[:_MAX_LANES],
        "totals": totals,
        "notes": list(_notes(origin, len(calls))),
    }


def _find_origin(
    metrics: Mapping[str, Any], sequences: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the Unix time at which the request began; None if it or that of a turn is unknown."""
    turns = (turn for one in sequences for turn in one["turns"] if turn["seconds"])
    if any(turn.get("seconds_started") is None for turn in turns):
        return None
    started = metrics.get("seconds_started")
    return None if started is None else _number(started)


def _place_turns(sequences: Sequence[Mapping[str, Any]], origin: float | None) -> list[_Timed]:
    at, placed = 0.0, list[_Timed]()
    for sequence in sequences:
        starts = list[float]()
        for turn in sequence["turns"]:
            if origin is not None and turn.get("seconds_started") is not None:
                at = max(0.0, _number(turn["seconds_started"]) - origin)
            starts.append(at)
            at += _number(turn["seconds"])
        placed.append(_Timed(sequence, starts, origin))
    return placed


def _pack(groups: Iterable[list[Bar]], main: int | None = None) -> list[list[Bar]]:
    """Put groups of bars into as few lanes as their times allow; `main` names that of the first."""
    indexed = [(number != main, group) for number, group in enumerate(groups) if group]
    lanes: list[list[Bar]] = [[]] if main is not None else []
    for _, group in sorted(indexed, key=lambda pair: (pair[0], pair[1][0].start)):
        first, last = group[0].start, max(bar.end for bar in group)
        for lane in lanes:
            if all(last <= bar.start or bar.end <= first for bar in lane):
                lane += group
                break
        else:
            lanes.append(group)
    return lanes


def _fill_gaps(bars: Sequence[Bar], ended: float) -> Iterator[Bar]:
    """Yield bars, and one of kind `other` for each time before the end that has none."""
    at, before = 0.0, "the start"
    for bar in bars:
        if bar.start - at > _SHORTEST_GAP_S:
            yield Bar("other", at, bar.start - at, f"between {before} and {bar.note or bar.kind}")
        yield bar
        at, before = max(at, bar.end), bar.note or bar.kind
    if ended - at > _SHORTEST_GAP_S:
        yield Bar("other", at, ended - at, f"after {before}")


def _notes(origin: float | None, num_lanes: int) -> Iterator[str]:
    if origin is None:
        yield NO_CLOCK
    if num_lanes > _MAX_LANES:
        yield f"{num_lanes} calls ran at the same time: {_MAX_LANES} lanes of them are drawn"


def _number(value: Any) -> float:
    """Return a time as a float; 0 for a value that is none."""
    is_time = type(value) in (int, float) and 0 <= value < _LONGEST
    return float(value) if is_time else 0.0
