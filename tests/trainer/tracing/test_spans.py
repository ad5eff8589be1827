"""Spans from what requests recorded: nesting, workers, sub-agents, requests without times."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from agentrl.config.schema.reward import RewardConfig, RewardWeightsConfig
from agentrl.engines.protocol import SamplingParams
from agentrl.engines.scripted import Answer, ScriptedAnswer, ScriptedEngine
from agentrl.rewards import drive_and_score
from agentrl.rollout.records import CallRecord
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.rollout_pool import WorkerScores
from agentrl.trainer.tracing.spans import Interval, Span, request_span, step_span
from tests.fakes.plugins import (
    FakeTool,
    FakeUser,
    calling,
    make_context,
    make_prompts,
    make_scripted,
)
from tests.fakes.rollout_workers import WorkerSetup, hurry


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def talking() -> ScriptedEngine:
    """Every request calls the tool once."""

    def script(_ids: Sequence[int], _s: SamplingParams, _request: str, turn: int) -> Answer:
        text = "Done." if turn else calling("lookup", q="Bern")
        return ScriptedAnswer(text, delay_s=0.01)

    return make_scripted(script)


def all_spans(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from all_spans(child)


def assert_parts_are_inside(span: Span) -> None:
    for one in all_spans(span):
        for child in one.children:
            assert one.started <= child.started <= child.ended <= one.ended


def names(span: Span) -> Any:
    return {span.name: [names(child) for child in span.children]} if span.children else span.name


WITH_A_CALL = {
    "request": [{"turn": ["engine_call", "tool_call"]}, {"turn": ["engine_call"]}, "score"]
}


async def test_requests_of_rollout_workers_come_back_with_the_times_of_their_spans():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=2)
    pool = setup.make_pool(setup.connect(2))
    await pool.open()
    manager = setup.pool_manager(pool, talking())
    try:
        finished = await drive_and_score(
            manager,
            WorkerScores(pool, setup.make_rewards()),
            manager.make_requests(make_prompts(3), manager.train_plan()),
            on_finished=lambda _: None,
        )
    finally:
        await pool.close()
    assert len(finished) == 6
    for request in finished:
        span = request_span(request, 3, RewardConfig(weights=RewardWeightsConfig(trajectory=2.0)))
        assert span is not None
        assert names(span) == WITH_A_CALL
        assert_parts_are_inside(span)
        assert span.attributes["agentrl.step"] == 3
        assert span.attributes["agentrl.reward"] == 1.0
        assert all(one.ended - one.started >= 0.01 for one in span.children[0].children[:1])


async def test_the_reply_of_a_user_is_a_part_of_the_turn_that_it_answers():
    engine = make_scripted(lambda *_: "Hello.")
    context = make_context(engine, interactions=[FakeUser("And then?")])
    request = AsyncRolloutRequest(
        messages=make_prompts(1)[0].messages, interaction_kwargs={"name": "fake"}
    )
    await run_request(request, context)
    span = request_span(request, step=1)
    assert span is not None
    parts = [child.name for turn in span.children for child in turn.children]
    assert parts == ["engine_call", "interaction", "engine_call"]
    assert_parts_are_inside(span)


def finished(request_id: str, at: float, **fields: Any) -> AsyncRolloutRequest:
    """A finished request of one second, with one completion of half a second."""
    request = AsyncRolloutRequest(request_id=request_id, messages=[], **fields)
    request.metrics |= {"seconds_started": at, "seconds": 1.0}
    request.begin([1])
    request.take_edge(RequestState.RUNNING)
    request.append_sampled([2], [-0.5], seconds=0.5, seconds_started=at + 0.25)
    request.finish(StopReason.ANSWERED)
    return request


def test_a_sub_agent_has_its_turns_and_its_earlier_sequences_in_a_span_of_its_own():
    helper = AsyncRolloutRequest(request_id="helper", messages=[])
    helper.begin([1])
    helper.take_edge(RequestState.RUNNING)
    helper.append_sampled([2], [-0.5], seconds=0.1, seconds_started=100.1)
    helper.set_aside("compaction")
    helper.begin([3])
    helper.append_sampled([4], [-0.5], seconds=0.1, seconds_started=100.3)
    helper.finish(StopReason.ANSWERED)
    helper.metrics |= {"seconds_started": 100.0, "seconds": 0.5}
    request = finished("whole", 100.0)
    request.add_branch(helper, "delegate")
    span = request_span(request, step=1)
    assert span is not None
    turn = {"turn": ["engine_call"]}
    assert names(span) == {"request": [{"sub_agent": [turn, turn]}, turn]}
    assert_parts_are_inside(span)


def test_a_request_without_a_start_has_no_spans():
    request = AsyncRolloutRequest(messages=[])
    request.begin([1])
    request.take_edge(RequestState.RUNNING)
    request.finish(StopReason.ANSWERED)
    assert request_span(request, step=1) is None


def test_a_failed_call_and_its_request_say_what_failed():
    request = finished("a", 10.0)
    call = CallRecord(
        name="lookup", outcome="timeout", message="late", seconds=0.1, seconds_started=10.8
    )
    request.turns[0].calls = [call]
    span = request_span(request, step=1)
    assert span is not None
    found = {one.name: one.error for one in all_spans(span)}
    assert found == {"request": "", "turn": "", "engine_call": "", "tool_call": "late"}


def test_phases_nest_by_their_times():
    intervals = [
        Interval("gen", 1.0, 2.0),
        Interval("update_actor", 2.0, 3.0),
        Interval("step", 1.0, 3.5),
        Interval("gen", 4.0, 5.0),
        Interval("validate", 4.0, 6.0),
    ]
    span = step_span(7, intervals)
    assert span is not None
    assert names(span) == {"step": [{"train_step": ["gen", "update_actor"]}, {"validate": ["gen"]}]}
    assert (span.started, span.ended, span.attributes) == (1.0, 6.0, {"agentrl.step": 7})
    assert step_span(7, []) is None
