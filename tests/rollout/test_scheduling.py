# pyright: reportIncompatibleMethodOverride=false
"""Deterministic mode: rounds in the requests' order, and batches that are equal bit for bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema.run import FailureConfig
from agentrl.engines import TransformersEngineSettings
from agentrl.engines.protocol import Completion, EngineCall, SamplingParams
from agentrl.engines.scripted import Answer, ScriptedAnswer, ScriptedEngine
from agentrl.engines.transformers.requests import TrackedState
from agentrl.errors import EngineError, Fault, RolloutError
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import (
    FakeTool,
    assert_invariants,
    calling,
    check_life,
    make_context,
    make_manager,
    make_prompts,
    tiny_tokenizer,
)
from tests.fakes.scheduling import (
    Latency,
    Scenario,
    SlowTool,
    SlowUser,
    collated,
    differences,
    random_time,
    tokens,
)

CALL = calling("lookup", q="Bern")


class NotingEngine(ScriptedEngine):
    """Notes who shares a round, and what happens when."""

    def __init__(self, script: Any) -> None:
        super().__init__(script, tokenizer=tiny_tokenizer())
        self.rounds: list[list[int]] = []
        self.events: list[str] = []
        self.aborted: list[str] = []

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> list[Completion | BaseException]:
        self.rounds.append([_place(call.request_id) for call in calls])
        self.events.append("begin")
        answers = await super().generate_together(calls)
        self.events.append("end")
        return answers

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await super().abort(request_id)


def _place(request_id: str) -> int:
    return int(request_id.partition("~")[0].rpartition("-")[2])


def manager_of(engine: ScriptedEngine, tool: FakeTool | None = None, **rollout: Any) -> Any:
    context = make_context(engine, tools=[tool or FakeTool()])
    return make_manager(context, deterministic=True, **rollout)


def requests_of(manager: RolloutManager) -> list[AsyncRolloutRequest]:
    return manager.make_requests(make_prompts(1), manager.train_plan())


def turns(*numbers: int) -> Any:
    """A script by which the request at each place makes so many turns."""

    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        return "Bern." if turn + 1 >= numbers[_place(request_id)] else CALL

    return script


# Who shares a round.


def expected_rounds(num_turns: Sequence[int], room: int) -> list[list[int]]:
    """Compute the rounds by hand: members take a turn each; who is done is replaced."""
    left = dict(enumerate(num_turns))
    rounds: list[list[int]] = []
    while alive := [place for place, number in left.items() if number > 0][:room]:
        rounds.append(alive)
        for place in alive:
            left[place] -= 1
    return rounds


@settings(max_examples=12)
@given(
    num_turns=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    room=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_resume_is_exact_who_shares_a_round_depends_on_the_requests_alone(
    num_turns: list[int], room: int, seed: int
):
    class Tool(SlowTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            if not num_turns[_place(str(instance_id))]:
                raise ValueError("never begins")
            return await super().create(instance_id, **kwargs)

    engine = NotingEngine(turns(*num_turns))
    manager = manager_of(
        engine,
        Tool(random_time(seed, longest_s=0.003)),
        n=len(num_turns),
        max_concurrent_requests=room,
        failure=FailureConfig(max_failed_frac=1.0),
    )
    done = asyncio.run(manager.rollout(requests_of(manager)))
    assert engine.rounds == expected_rounds(num_turns, room)
    assert [r.num_assistant_turns for r in done] == num_turns
    for request in done:
        assert_invariants(request, engine)


async def test_a_round_returns_all_results_together_and_starts_when_all_wait():
    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        delay_s = 0.01 * (3 - _place(request_id))
        return ScriptedAnswer("Bern." if turn == 2 else CALL, delay_s=delay_s)

    engine = NotingEngine(script)

    class Tool(SlowTool):
        async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
            engine.events.append("tool")
            found = await super().execute(instance_id, parameters, **kwargs)
            engine.events.append("tool")
            return found

    manager = manager_of(engine, Tool(random_time(0)), n=3)
    await manager.rollout(requests_of(manager))
    between = ["begin", "end", *["tool"] * 6]
    assert engine.events == [*between, *between, "begin", "end"]


async def test_the_script_is_called_in_the_order_of_the_requests():
    engine = NotingEngine(turns(3, 3, 3, 3))
    manager = manager_of(engine, SlowTool(random_time(3)), n=4)
    await manager.rollout(requests_of(manager))
    assert [_place(record.request_id) for record in engine.records] == [0, 1, 2, 3] * 3


async def test_prefixes_are_dropped_when_a_rollout_begins():
    engine = NotingEngine(turns(1, 1))
    manager = manager_of(engine, n=2)
    for number in (1, 2):
        await manager.rollout(requests_of(manager))
        assert engine.num_flushes == number


def test_nothing_to_roll_out_is_no_failure():
    assert asyncio.run(manager_of(NotingEngine(turns())).rollout([])) == []


# Failures and cancellation.


async def test_a_retry_keeps_its_seat():
    attempts: list[str] = []

    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        attempts.append(request_id)
        failed = turn == 1 and request_id.endswith("-1")
        return EngineError("gone") if failed else ("Bern." if turn else CALL)

    engine = NotingEngine(script)
    failure = FailureConfig(policy="retry")
    manager = manager_of(engine, n=4, max_concurrent_requests=2, failure=failure)
    done = await manager.rollout(requests_of(manager))
    assert engine.rounds == [[0, 1], [0, 1], [1, 2], [1, 2], [3], [3]]
    assert [r.attempt for r in done] == [0, 1, 0, 0]
    assert all(r.stop_reason is StopReason.ANSWERED for r in done)


@pytest.mark.parametrize("error", [EngineError("gone"), asyncio.CancelledError(), TypeError("no")])
async def test_an_engine_failure_fails_the_round_and_blocks_no_request(
    error: BaseException,
):
    class Broken(NotingEngine):
        async def generate_together(self, calls: Sequence[EngineCall]) -> Any:
            if len(self.rounds) == 1:
                self.rounds.append([])
                raise error
            return await super().generate_together(calls)

    engine = Broken(turns(2, 2, 1, 1))
    failure = FailureConfig(max_failed_frac=1.0)
    manager = manager_of(engine, n=4, max_concurrent_requests=3, failure=failure)
    async with asyncio.timeout(50):
        done = await manager.rollout(requests_of(manager))
    assert [r.stop_reason for r in done[:2]] == [StopReason.FAILED] * 2
    assert [r.error and r.error.kind for r in done[:2]] == [type(error).__name__] * 2
    assert done[2].stop_reason is StopReason.ANSWERED
    assert len(engine.rounds) >= 2


async def test_a_wall_clock_that_fires_while_waiting_for_a_round_costs_that_request_alone():
    class Tool(FakeTool):
        async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.3 if _place(instance_id) == 0 else 0)
            return await super().execute(instance_id, parameters, **kwargs)

    engine = NotingEngine(turns(2, 2, 2))
    manager = manager_of(engine, Tool(), n=3)
    requests = requests_of(manager)
    requests[1].budgets = requests[1].budgets.model_copy(update={"timeout_s": 0.1})
    done = await manager.rollout(requests)
    ends = [StopReason.ANSWERED, StopReason.WALL_CLOCK, StopReason.ANSWERED]
    assert [r.stop_reason for r in done] == ends
    assert engine.rounds == [[0, 1, 2], [0, 2]]
    assert engine.aborted == []


async def test_a_wall_clock_that_fires_in_a_round_takes_that_call_alone_out_of_the_engine():
    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        delay_s = 60.0 if _place(request_id) == 1 else 0.2
        return ScriptedAnswer("Bern.", delay_s=delay_s)

    engine = NotingEngine(script)
    manager = manager_of(engine, n=4, max_concurrent_requests=3)
    requests = requests_of(manager)
    requests[1].budgets = requests[1].budgets.model_copy(update={"timeout_s": 0.1})
    async with asyncio.timeout(50):
        done = await manager.rollout(requests)
    assert [r.stop_reason for r in done].count(StopReason.ANSWERED) == 3
    assert done[1].stop_reason is StopReason.WALL_CLOCK
    assert engine.aborted == [done[1].request_id]
    assert engine.rounds == [[0, 1, 2], [3]]


@pytest.mark.parametrize("delay_s", [0.0, 60.0])
async def test_cancelling_ends_and_releases_everything_and_the_round(delay_s: float):
    """In a round, where the engine is slow; between two rounds, where a tool is."""

    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        return ScriptedAnswer(CALL, delay_s=delay_s if turn else 0.0)

    class Tool(FakeTool):
        async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.0 if delay_s or _place(instance_id) else 60.0)
            return await super().execute(instance_id, parameters, **kwargs)

    tool, engine = Tool(), NotingEngine(script)
    manager = manager_of(engine, tool, n=6, max_concurrent_requests=3)
    requests = requests_of(manager)
    before = asyncio.all_tasks()
    task = asyncio.create_task(manager.rollout(requests))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [r.stop_reason for r in requests] == [StopReason.ABORTED] * 6
    assert len(tool.lives) == 3
    check_life(tool.lives, "create", "release")
    assert asyncio.all_tasks() == before
    assert (await engine.generate([1], SamplingParams(max_new_tokens=1), request_id="x")).token_ids


# The same batch, bit for bit.

SMALL_CACHE = TransformersEngineSettings(
    max_model_len=512, page_size=16, num_pages=38, max_batch_tokens=256
)


def failing_tool(latency: Latency) -> SlowTool:
    """In the first attempt it cannot be created by some, and breaks off others."""

    class Tool(SlowTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            created = await super().create(instance_id, **kwargs)
            if str(instance_id).endswith(("-1", "-3~1")):
                raise ValueError("not now")
            return created

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            await super().calc_reward(instance_id, **kwargs)
            return float("nan") if instance_id.endswith("-2") else 1.0

    return Tool(latency)


def breaking_user(latency: Latency) -> SlowUser:
    """Breaks off in the second reply of some."""

    class User(SlowUser):
        async def generate_response(
            self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
        ) -> Any:
            reply = await super().generate_response(instance_id, messages, **kwargs)
            if instance_id.endswith("-0") and self.lives[instance_id].count("respond") == 2:
                raise ValueError("no more")
            return reply

    return User(latency, "Sure?", "Really?")


def plain(latency: Latency) -> Scenario:
    return Scenario(latency=latency)


def few_requests(latency: Latency) -> Scenario:
    return Scenario(latency=latency, rollout={"max_concurrent_requests": 5})


def retries(latency: Latency) -> Scenario:
    failure = FailureConfig(policy="retry", max_retries=2, max_failed_frac=1.0)
    return Scenario(
        tool=failing_tool(latency),
        user=breaking_user(latency),
        rollout={"failure": failure, "max_concurrent_requests": 7},
    )


def little_cache(latency: Latency) -> Scenario:
    return Scenario(latency=latency, settings=SMALL_CACHE)


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_an_engine_that_answers_too_few_or_too_many_calls_fails_the_round(number: int):
    class Miscounts(NotingEngine):
        async def generate_together(
            self, calls: Sequence[EngineCall]
        ) -> list[Completion | BaseException]:
            return ((await super().generate_together(calls)) * 2)[:number]

    manager = manager_of(Miscounts(turns(1, 1)), n=2, failure=FailureConfig(max_failed_frac=1.0))
    async with asyncio.timeout(50):
        done = await manager.rollout(requests_of(manager))
    for request in done:
        assert request.error is not None
        assert request.error.fault is Fault.ENGINE
        assert f"returned {number} results" in request.error.message


async def test_a_second_deterministic_rollout_on_an_engine_is_refused():
    engine = NotingEngine(turns(2))
    managers = [manager_of(engine, SlowTool(lambda: 0.01), n=1) for _ in range(2)]
    first = asyncio.create_task(managers[0].rollout(requests_of(managers[0])))
    await asyncio.sleep(0)
    with pytest.raises(RolloutError, match="another deterministic rollout"):
        await managers[1].rollout(requests_of(managers[1]))
    [request] = await first
    assert request.stop_reason is StopReason.ANSWERED
    [request] = await managers[1].rollout(requests_of(managers[1]))
    assert request.stop_reason is StopReason.ANSWERED


async def test_an_engine_is_free_again_if_its_cache_cannot_be_dropped():
    class Broken(NotingEngine):
        async def flush_cache(self) -> None:
            raise EngineError("no cache")

    manager = manager_of(Broken(turns(1)), n=1)
    for _ in range(2):
        with pytest.raises(EngineError, match="no cache"):
            await manager.rollout(requests_of(manager))


SCENARIOS = [plain, few_requests, retries, little_cache]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resume_is_exact_shuffled_latencies_give_the_same_batch_bit_for_bit(
    scenario: Any, monkeypatch: pytest.MonkeyPatch
):
    compare_runs(scenario, 2, monkeypatch, num_prompts=2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resume_is_exact_twenty_runs_with_shuffled_latencies_give_the_same_batch_bit_for_bit(
    scenario: Any, monkeypatch: pytest.MonkeyPatch
):
    compare_runs(scenario, 20, monkeypatch, num_prompts=5)


def compare_runs(
    make: Any, number: int, monkeypatch: pytest.MonkeyPatch, *, num_prompts: int
) -> None:
    preempted = count_preemptions(monkeypatch)
    scenes = [replace(make(random_time(seed)), num_prompts=num_prompts) for seed in range(number)]
    runs = [scenario.run_fresh() for scenario in scenes]
    batches = [collated(run) for run in runs]
    assert [differences(batches[0], batch) for batch in batches[1:]] == [[]] * (number - 1)
    assert any(turn.calls for request in runs[0] for turn in request.turns)
    assert any(request.num_user_turns for request in runs[0])
    assert any(turn.cached_tokens for request in runs[0] for turn in request.turns)
    assert bool(preempted) == (make is little_cache)
    assert any(request.attempt for request in runs[0]) == (make is retries)


def count_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library takes the pages of a running request, which begins again."""
    preempted: list[str] = []
    begin_again = TrackedState.create_equivalent_initial_request

    def noted(state: TrackedState) -> Any:
        preempted.append(state.request_id)
        return begin_again(state)

    monkeypatch.setattr(TrackedState, "create_equivalent_initial_request", noted)
    return preempted


def test_what_ran_before_on_the_engine_changes_no_bit():
    """A validation leaves prefixes behind that a resumed run would not have."""
    fresh = collated(Scenario(latency=random_time(1), num_prompts=2).run_fresh())
    engine = Scenario().make_engine()

    async def second() -> list[AsyncRolloutRequest]:
        try:
            await Scenario(latency=random_time(2), num_prompts=3).run(engine, step=7)
            return await Scenario(latency=random_time(3), num_prompts=2).run(engine)
        finally:
            await engine.close()

    assert differences(fresh, collated(asyncio.run(second()))) == []


def test_which_requests_share_a_batch_changes_last_bits_and_no_token():
    """Why there are rounds: the comparisons above can fail."""
    together = Scenario(num_prompts=2).run_fresh()
    apart = Scenario(num_prompts=2, rollout={"max_concurrent_requests": 3}).run_fresh()
    assert differences(collated(together), collated(apart)) == ["rollout_log_probs"]
    assert list(map(tokens, together)) == list(map(tokens, apart))
