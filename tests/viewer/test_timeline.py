"""The time line of states follows from what a saved request recorded."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.scripted import ScriptedAnswer
from agentrl.rollout.runner import run_request
from agentrl.viewer.timeline import NO_CLOCK, Bar, describe_timeline
from tests.fakes.finished_requests import finished_requests
from tests.fakes.plugins import (
    FakeTool,
    FakeUser,
    calling,
    make_context,
    make_engine,
)
from tests.fakes.plugins import (
    make_request as make_pending,
)

START = 1000.0


def make_turn(
    role: str, started: float | None, seconds: float, calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    at = None if started is None else START + started
    turn = {"index": 0, "role": role, "seconds": seconds, "seconds_started": at}
    return {**turn, "calls": [*calls]}


def make_call(started: float | None, queued: float, worked: float) -> dict[str, Any]:
    at = None if started is None else START + started
    times = {"seconds_started": at, "queue_seconds": queued, "seconds": worked}
    return {"name": "search", "outcome": "ok", **times}


def make_request(*turns: dict[str, Any], **metrics: float) -> dict[str, Any]:
    metrics = {"seconds_started": START, **metrics}
    return {"turns": [*turns], "metrics": metrics, "branches": []}


def shown(bars: Sequence[Bar]) -> list[tuple[str, float, float]]:
    return [(bar.kind, round(bar.start, 6), round(bar.seconds, 6)) for bar in bars]


TOOLS = make_request(
    make_turn("assistant", 0.5, 1, [make_call(1.6, 0.25, 0.5), make_call(1.6, 0, 1)]),
    make_turn("tool", 1.5, 1.25),
    make_turn("assistant", 3, 2, [make_call(None, 0, 0)]),
    make_turn("user", 5, 1),
    seconds=6.5,
    seconds_reward_started=START + 7,
    seconds_reward=0.5,
)


def test_states_follow_each_other_and_unexplained_time_is_other():
    line = describe_timeline(TOOLS)
    assert [shown(lane) for lane in line["states"]] == [
        [
            ("pending", 0, 0.5),
            ("running", 0.5, 1),
            ("tool_calling", 1.5, 1.25),
            ("other", 2.75, 0.25),
            ("running", 3, 2),
            ("interacting", 5, 1),
            ("other", 6, 1),
            ("scoring", 7, 0.5),
        ]
    ]
    assert (line["seconds"], line["ended"], line["totals"]["running"]) == (7.5, 6.5, 3)
    assert line["notes"] == []


def test_calls_at_the_same_time_have_lanes_and_those_not_executed_none():
    assert [shown(lane) for lane in describe_timeline(TOOLS)["calls"]] == [
        [("queue", 1.6, 0.25), ("work", 1.85, 0.5)],
        [("work", 1.6, 1)],
    ]


def test_calls_one_after_another_share_a_lane():
    calls = [make_call(1 + at, 0.25, 0.5) for at in range(3)]
    line = describe_timeline(make_request(make_turn("assistant", 0, 1, calls), seconds=4))
    assert len(line["calls"]) == 1
    assert line["totals"]["work"] == 1.5


def test_calls_after_which_the_request_ends_are_the_state():
    calls = [make_call(1.25, 0.25, 0.5)]
    line = describe_timeline(make_request(make_turn("assistant", 0, 1, calls), seconds=2))
    assert shown(line["states"][0])[1:] == [
        ("other", 1, 0.25),
        ("tool_calling", 1.25, 0.75),
    ]


def test_many_calls_at_the_same_time_are_cut_with_a_note():
    calls = [make_call(1, 0, 1) for _ in range(100)]
    line = describe_timeline(make_request(make_turn("assistant", 0, 1, calls), seconds=2))
    assert len(line["calls"]) == 24
    assert line["notes"] == ["100 calls ran at the same time: 24 lanes of them are drawn"]


def test_a_sub_agent_has_a_lane_and_a_sequence_before_a_compaction_has_none():
    request = make_request(make_turn("assistant", 5, 1), seconds=6)
    delegate = make_request(make_turn("assistant", 5.25, 0.5)) | {"branch_cause": "delegate"}
    earlier = make_request(make_turn("assistant", 1, 3))
    line = describe_timeline({**request, "branches": [earlier, delegate]})
    assert [shown(lane) for lane in line["states"]] == [
        [("pending", 0, 1), ("running", 1, 3), ("other", 4, 1), ("running", 5, 1)],
        [("running", 5.25, 0.5)],
    ]
    assert line["states"][1][0].note == "turn 0 (delegate)"


def test_a_request_without_turns_was_pending():
    assert shown(describe_timeline(make_request(seconds=2))["states"][0]) == [("pending", 0, 2)]


def test_turns_without_a_start_are_drawn_one_after_another():
    turns = make_turn("assistant", None, 1, [make_call(5, 0, 0.5)]), make_turn("tool", None, 0.5)
    line = describe_timeline(make_request(*turns, seconds=2))
    assert shown(line["states"][0]) == [
        ("running", 0, 1),
        ("tool_calling", 1, 0.5),
        ("other", 1.5, 0.5),
    ]
    assert shown(line["calls"][0]) == [("work", 1, 0.5)]
    assert line["notes"] == [NO_CLOCK]


@pytest.mark.parametrize("value", ["x", None, -1, float("nan"), float("inf"), 10**99])
def test_a_time_that_is_no_time_counts_as_none(value: Any):
    turn = make_turn("assistant", 0, value, [make_call(0, value, value)])
    line = describe_timeline(make_request(turn, seconds=value))
    assert line["ended"] == 0


@given(finished_requests(), st.booleans(), st.data())
def test_bars_never_overlap_and_leave_no_gap(request: Any, is_timed: bool, data: st.DataObject):
    saved, at = request.model_dump(mode="json"), START
    for turn in saved["turns"]:
        at += data.draw(st.floats(0, 3))
        turn["seconds_started"] = at if is_timed else None
        at += turn["seconds"]
    saved["metrics"] |= {"seconds_started": START, "seconds": at - START + 1}
    for call in (call for turn in saved["turns"] for call in turn["calls"]):
        call["seconds"] = 0.0  # the calls of the fakes last as long as they like
    line = describe_timeline(saved)
    bars = line["states"][0]
    for before, after in pairwise(bars):
        assert abs(after.start - before.end) <= 2e-4
    assert abs(bars[0].start) <= 2e-4
    assert abs(bars[-1].end - line["ended"]) <= 2e-4


class SlowTool(FakeTool):
    """Takes 40 ms for each call."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(0.04)
        return await super().execute(instance_id, parameters, **kwargs)


async def test_the_bars_of_a_driven_request_have_the_times_of_its_work():
    call = calling("lookup", q="Bern")
    answers = (f"See.{call}{call}", "It rains.", "Goodbye.")
    engine = make_engine(*(ScriptedAnswer(text, delay_s=0.03) for text in answers))
    context = make_context(engine, tools=[SlowTool()], interactions=[FakeUser("And now?")])
    asked = {"name": "fake"}
    request = await run_request(make_pending(interaction_kwargs=asked), context)
    line = describe_timeline(request.model_dump(mode="json"))
    assert line["notes"] == []
    assert len(line["states"]) == 1
    bars = [bar for bar in line["states"][0] if bar.kind not in ("other", "pending")]
    assert [bar.kind for bar in bars] == [
        *("running", "tool_calling", "running", "interacting", "running"),
    ]  # fmt: skip
    assert all(bar.seconds >= 0.03 for bar in bars if bar.kind == "running")
    assert bars[1].seconds >= 0.04
    works = [bar for lane in line["calls"] for bar in lane if bar.kind == "work"]
    assert len(works) == 2
    for work in works:
        assert work.seconds >= 0.04
        assert bars[1].start <= work.start + 1e-3
        assert work.end <= bars[1].end + 1e-3
    assert line["ended"] == pytest.approx(request.metrics["seconds"])
