"""Tracks of trace files: slots, and slices that overlap."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.tracing.spans import Span, Trace
from agentrl.trainer.tracing.trace_files import trace_events
from tests.trainer.tracing.test_tracer import assert_slices_nest


def trace(started: float, ended: float, *children: Span, rank: int = 0) -> Trace:
    span = Span("request", started, ended)
    span.add(children)
    return Trace("ab" * 16, rank, span)


def track_names(events: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


def test_requests_that_follow_each_other_share_a_slot():
    events = list(trace_events([trace(0, 2), trace(1, 4), trace(2, 3), trace(3, 5)]))
    assert track_names(events) == ["requests 0", "requests 1"]
    slices = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (1, 0, 2_000_000), (2, 1_000_000, 3_000_000), (1, 2_000_000, 1_000_000),
        (1, 3_000_000, 2_000_000),
    ]  # fmt: skip


def test_calls_at_the_same_time_have_tracks_of_their_own():
    turn = Span("turn", 0, 9)
    turn.add([Span("tool_call", 1, 4), Span("tool_call", 2, 5), Span("tool_call", 4, 6)])
    events = list(trace_events([trace(0, 10, turn)]))
    assert track_names(events) == ["requests 0", "requests 0, parallel 1"]
    assert_slices_nest([event for event in events if event["ph"] == "X"])


def test_each_rank_is_a_process():
    events = list(trace_events([trace(0, 1), trace(0, 1, rank=3)]))
    processes = [e for e in events if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in processes] == [(0, "rank 0"), (3, "rank 3")]
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 3}


TIMES = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda at: (at[0], at[0] + at[1]))


@given(st.lists(st.tuples(TIMES, st.lists(st.tuples(TIMES, st.lists(TIMES, max_size=4))))))
def test_no_two_slices_of_a_track_overlap_in_part(requests: Any):
    traces: list[Trace] = []
    for at, turns in requests:
        children: list[Span] = []
        for turn_at, calls in turns:
            turn = Span("turn", *turn_at)
            turn.add(Span("tool_call", *call_at) for call_at in calls)
            children.append(turn)
        traces.append(trace(*at, *children))
    events = [event for event in trace_events(traces) if event["ph"] == "X"]
    assert_slices_nest(events)
    assert len(events) == sum(
        1 + sum(1 + len(calls) for _, calls in turns) for _, turns in requests
    )
