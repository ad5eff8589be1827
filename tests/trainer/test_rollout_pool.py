"""Requests that rollout workers run: the same results as in one process, whatever dies."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config.schema.run import FailureConfig
from agentrl.data.rows import Prompt
from agentrl.engines.protocol import Completion, SamplingParams
from agentrl.engines.scripted import Answer, ScriptedAnswer, ScriptedEngine
from agentrl.errors import ConfigError, EngineError, Fault
from agentrl.messages import ContentPart, Message, ToolResponse
from agentrl.rewards import drive_and_score
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.trainer.rollout_pool import MAX_LOST, RolloutPool, WorkerScores
from tests.fakes.plugins import FakeTool, calling, check_life, make_prompts, make_scripted
from tests.fakes.rollout_workers import FakeConnection, WorkerSetup, hurry
from tests.fakes.scheduling import (
    MULTI_TURN,
    ByLength,
    Scenario,
    SlowTool,
    SlowUser,
    collated,
    differences,
    random_time,
)
from tests.fakes.vision_chat import make_vision_template
from tests.fakes.vision_models import make_tokenizer, random_picture
from tests.fakes.waiting import until

CALL = calling("lookup", q="Bern")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def talking(num_turns: int = 3, *, delay_s: float = 0.0) -> ScriptedEngine:
    """Every request calls the tool in all turns but its last."""

    def script(_ids: Sequence[int], _s: SamplingParams, request_id: str, turn: int) -> Answer:
        text = f"I am {request_id}." if turn + 1 >= num_turns else CALL
        return ScriptedAnswer(text, delay_s=delay_s)

    return make_scripted(script)


def plain(value: Any) -> Any:
    """What a request has become, without what a clock says."""
    if isinstance(value, AsyncRolloutRequest):
        return plain(value.model_dump())
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        clocks = {"metrics", "seconds", "queue_seconds", "seconds_started"}
        return {name: plain(one) for name, one in value.items() if name not in clocks}
    return value


async def roll_out(
    setup: WorkerSetup, engine: Any, connections: Sequence[FakeConnection], number: int = 3
) -> list[AsyncRolloutRequest]:
    pool = setup.make_pool(connections)
    await pool.open()
    try:
        manager = setup.pool_manager(pool, engine)
        return await manager.rollout(requests_of(manager, number))
    finally:
        await pool.close()


def requests_of(manager: Any, number: int = 3) -> list[AsyncRolloutRequest]:
    return manager.make_requests(make_prompts(number), manager.train_plan())


# The same as in one process.


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_workers_return_what_one_process_returns(num_workers: int):
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=4)
    expected = await (manager := setup.local_manager(talking())).rollout(requests_of(manager))
    connections = setup.connect(num_workers)
    finished = await roll_out(setup, talking(), connections)
    assert list(map(plain, finished)) == list(map(plain, expected))
    assert all(connection.num_sent_bytes for connection in connections)


async def test_pictures_of_prompts_and_tools_reach_workers_and_the_ranks_engine():
    class NotingEngine(ScriptedEngine):
        """Notes the pictures of each call."""

        async def generate(self, *args: Any, media: Any = (), **kwargs: Any) -> Completion:
            shown = [(span.start, span.end, span.item.digest) for span in media]
            calls[kwargs["request_id"]].append(shown)
            return await super().generate(*args, media=media, **kwargs)

    def finish(manager: Any) -> Any:
        pictures = {"image": [random_picture(1, (24, 16))]}
        messages = [Message(role="user", content=[ContentPart(type="image")])]
        prompts = [
            Prompt(index=index, messages=messages, multi_modal_data=pictures) for index in range(2)
        ]
        return manager.rollout(manager.make_requests(prompts, manager.train_plan()))

    def engine() -> NotingEngine:
        return NotingEngine([CALL, "Seen."], tokenizer=make_tokenizer())

    setup = WorkerSetup(
        tools=lambda: [FakeTool(reply=lambda _: ToolResponse(image=[random_picture(2, (16, 40))]))],
        multi_turn={"template": make_vision_template("qwen2_vl")},
        n=2,
    )
    calls: defaultdict[str, list[Any]] = defaultdict(list)
    expected, alone = await finish(setup.local_manager(engine())), dict(calls)
    calls.clear()
    pool = setup.make_pool(setup.connect(2))
    await pool.open()
    finished = await finish(setup.pool_manager(pool, engine()))
    await pool.close()
    assert [len(shown) for shown in calls["train-0-0-0-0"]] == [1, 2]
    assert calls == alone
    for one, other in zip(finished, expected, strict=True):
        assert one.stop_reason is StopReason.ANSWERED, one.error
        assert one.input_ids == other.input_ids
        # Equal pictures of this process are one object, also those that came from a worker.
        assert all(
            a.item is b.item for a, b in zip(one.media_spans, other.media_spans, strict=True)
        )
        kept = [span.item.loaded.data for span in one.media_spans]
        assert all(a is b for a, b in zip(one.multi_modal_data["image"], kept, strict=True))


async def test_bytes_of_messages_are_counted_in_both_directions():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=2)
    connections = setup.connect(2)
    pool = setup.make_pool(connections)
    assert pool.traffic == (0, 0)
    manager = setup.pool_manager(pool, talking())
    await manager.rollout(requests_of(manager))
    first = pool.traffic
    assert first.sent == sum(connection.num_sent_bytes for connection in connections)
    assert first.received > 0
    await manager.rollout(requests_of(manager))
    assert pool.traffic.sent > first.sent
    await pool.close()


async def test_the_requests_that_a_rank_made_are_the_ones_that_end():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=2)
    pool = setup.make_pool(setup.connect(2))
    manager = setup.pool_manager(pool, talking())
    requests, seen = requests_of(manager), list[str]()
    finished = await manager.rollout(requests, on_finished=lambda one: seen.append(one.request_id))
    assert all(one is other for one, other in zip(requests, finished, strict=True))
    assert sorted(seen) == sorted(request.request_id for request in requests)
    await pool.close()


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), num_workers=st.integers(1, 3), num_kills=st.integers(0, 3))
def test_a_deterministic_batch_is_equal_bit_for_bit_also_if_workers_die(
    seed: int, num_workers: int, num_kills: int
):
    check_deterministic_batch(seed, num_workers, num_kills)


def test_a_deterministic_batch_of_two_workers_is_equal_bit_for_bit():
    check_deterministic_batch(seed=1, num_workers=2, num_kills=1)


def check_deterministic_batch(seed: int, num_workers: int, num_kills: int) -> None:
    """The embedded engine computes rounds of the calls of all workers; delays are random."""
    scenario = Scenario(num_prompts=2, num_samples=3)
    expected = collated(scenario.run_fresh())
    parser = ByLength()
    setup = WorkerSetup(
        tools=lambda: [SlowTool(random_time(seed))],
        users=lambda: [SlowUser(random_time(seed + 1), "Sure?", "Really?")],
        context=lambda c: replace(c, parser=parser, caller=ToolCaller(parser, c.fitter.fit)),
        multi_turn=MULTI_TURN,
        response=240,
        n=3,
        deterministic=True,
        failure=FailureConfig(max_failed_frac=1.0),
    )
    chance = random.Random(seed)

    async def main() -> list[AsyncRolloutRequest]:
        engine = scenario.make_engine()
        connections = setup.connect(num_workers)
        pool = setup.make_pool(connections)
        await pool.open()
        manager = setup.pool_manager(pool, engine)

        async def kill() -> None:
            for _ in range(num_kills):
                await asyncio.sleep(chance.random() * 0.1)
                chance.choice(connections).kill()

        killing = asyncio.create_task(kill())
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Scenario, "make_manager", lambda *_: manager)
                return await scenario.run(engine)
        finally:
            await killing
            await pool.close()
            await engine.close()

    finished = asyncio.run(main())
    assert differences(collated(finished), expected) == []


# Deaths, hangs, and requests that cause them.


class KillingTool(FakeTool):
    """Ends the worker of the given requests, in their first calls."""

    def __init__(self, deaths: "Counter[str]", connections: list[FakeConnection]) -> None:
        super().__init__()
        self.deaths, self.connections = deaths, connections

    async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
        for connection in self.connections:
            parts = connection.worker._parts  # pyright: ignore[reportPrivateUsage]
            is_here = parts is not None and self in parts.plugins.tools
            if is_here and self.deaths[instance_id] > 0:
                self.deaths[instance_id] -= 1
                connection.kill()
        return await super().execute(instance_id, parameters, **kwargs)


async def roll_out_with_deaths(
    deaths: "Counter[str]", num_workers: int = 2
) -> tuple[list[AsyncRolloutRequest], ScriptedEngine]:
    connections: list[FakeConnection] = []
    setup = WorkerSetup(
        tools=lambda: [KillingTool(deaths, connections)],
        n=4,
        failure=FailureConfig(max_failed_frac=1.0),
    )
    connections += setup.connect(num_workers)
    engine = talking()
    return await roll_out(setup, engine, connections), engine


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_the_requests_of_a_dead_worker_begin_again_with_the_same_ids(
    num_workers: int, caplog: pytest.LogCaptureFixture
):
    deaths = Counter({"train-0-0-0-1": 1, "train-0-2-2-3": 2})
    finished, _ = await roll_out_with_deaths(deaths, num_workers)
    expected, _ = await roll_out_with_deaths(Counter())
    assert list(map(plain, finished)) == list(map(plain, expected))
    assert not +deaths
    lines = [record.getMessage() for record in caplog.records]
    assert sum("is lost" in line and "begin again on others" in line for line in lines) == 3


async def test_completions_of_a_lost_run_are_not_sampled_again():
    """The engine has a turn for each call, so a second call would get the wrong answer."""
    _, engine = await roll_out_with_deaths(Counter({"train-0-1-1-0": 2}), 1)
    # A call that was sent to the engine before the death, and not answered, is sent again.
    again = {one.request_id: 0 for one in engine.records}
    for one in engine.records:
        again[one.request_id] += 1
    assert set(again.values()) <= {3, 4, 5}
    assert again["train-0-1-1-0"] == 3


async def test_a_request_that_ends_every_worker_fails_alone():
    finished, _ = await roll_out_with_deaths(Counter({"train-0-1-1-2": 99}), 2)
    failed = [request for request in finished if request.state is RequestState.FAILED]
    assert [request.request_id for request in failed] == ["train-0-1-1-2"]
    assert failed[0].error is not None
    assert failed[0].error.fault is Fault.ENGINE
    assert failed[0].error.kind == "WorkerLostError"
    assert f"{MAX_LOST} workers were lost" in failed[0].error.message


async def test_a_worker_that_hangs_is_replaced():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=4)
    connections = setup.connect(2)
    pool = setup.make_pool(connections)
    await pool.open()
    connections[0].is_hanging = True
    manager = setup.pool_manager(pool, talking())
    finished = await manager.rollout(requests_of(manager))
    assert {request.stop_reason for request in finished} == {StopReason.ANSWERED}
    assert [connection.num_deaths for connection in connections] == [1, 0]
    await pool.close()


async def test_without_any_worker_requests_fail_as_data_after_a_while():
    setup = WorkerSetup(n=2, failure=FailureConfig(max_failed_frac=1.0))
    connections = setup.connect(2)
    pool = setup.make_pool(connections)
    await pool.open()
    for connection in connections:
        connection.is_refusing = True
        connection.kill()
    manager = setup.pool_manager(pool, talking(1))
    finished = await manager.rollout(requests_of(manager, 1))
    assert {request.state for request in finished} == {RequestState.FAILED}
    assert finished[0].error is not None
    assert "rollout worker 1 does not start" in finished[0].error.message
    await pool.close()


async def test_a_worker_that_was_replaced_between_two_rollouts_is_used_again():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=2)
    connections = setup.connect(1)
    pool = setup.make_pool(connections)
    await pool.open()
    for _ in range(2):
        manager = setup.pool_manager(pool, talking())
        finished = await manager.rollout(requests_of(manager))
        assert {request.stop_reason for request in finished} == {StopReason.ANSWERED}
        connections[0].kill()
    await pool.close()


async def test_requests_of_a_rank_that_is_gone_are_aborted_and_released(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("agentrl.trainer.rollout_worker.HEARTBEAT_S", 0.05)
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=2)
    connections = setup.connect(1)
    pool = setup.make_pool(connections)
    pool._settings = replace(pool._settings, silence_s=0.2)  # pyright: ignore[reportPrivateUsage]
    await pool.open()
    [link] = pool._links  # pyright: ignore[reportPrivateUsage]
    hanging = setup.pool_manager(pool, talking(2, delay_s=60.0))
    rollout = asyncio.create_task(hanging.rollout(requests_of(hanging)))
    await until(lambda: any(tool.lives for tool in setup.tools) and link._receiver)  # pyright: ignore
    assert link._receiver is not None  # pyright: ignore[reportPrivateUsage]
    link._receiver.cancel()  # pyright: ignore[reportPrivateUsage]
    await until(lambda: not connections[0].worker._sessions)  # pyright: ignore
    lives = setup.tools[0].lives  # pyright: ignore
    await until(lambda: all(life[-1] == "release" for life in lives.values()))
    check_life(lives, "create", "release")
    rollout.cancel()
    await asyncio.wait([rollout])


async def test_other_tools_in_a_worker_are_refused():
    setup = WorkerSetup(tools=lambda: [FakeTool()])
    pool = setup.make_pool(setup.connect(1))
    setup.make_tools = lambda: [FakeTool(name="other")]
    with pytest.raises(ConfigError, match="other tools than the training rank"):
        await pool.open()


# Cancellation, retries, limits.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 60.0])
async def test_cancelling_ends_every_request_and_releases_its_tools(
    delay_s: float, deterministic: bool
):
    """While the engine samples, or while a tool works."""

    class Tool(FakeTool):
        async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.0 if delay_s else 60.0)
            return await super().execute(instance_id, parameters, **kwargs)

    setup = WorkerSetup(
        tools=lambda: [Tool()], n=4, deterministic=deterministic, max_concurrent_requests=6
    )
    pool = setup.make_pool(setup.connect(2))
    await pool.open()
    manager = setup.pool_manager(pool, engine := talking(delay_s=delay_s))
    requests = requests_of(manager)
    rollout = asyncio.create_task(manager.rollout(requests))
    await until(lambda: sum(bool(tool.lives) for tool in setup.tools) == 2)  # pyright: ignore
    rollout.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait([rollout])
    assert rollout.cancelled()
    assert {request.stop_reason for request in requests} == {StopReason.ABORTED}
    assert sum(bool(tool.lives) for tool in setup.tools) == 2  # pyright: ignore
    for tool in setup.tools:
        check_life(tool.lives, "create", "release")  # pyright: ignore
    assert not engine._waiting  # pyright: ignore[reportPrivateUsage]
    await pool.close()


async def test_a_retry_runs_again_with_another_id():
    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        broken = turn == 1 and request_id.endswith("-1")
        return EngineError("gone") if broken else ("Bern." if turn else CALL)

    setup = WorkerSetup(tools=lambda: [FakeTool()], n=4, failure=FailureConfig(policy="retry"))
    finished = await roll_out(setup, make_scripted(script), setup.connect(2), 1)
    assert [request.attempt for request in finished] == [0, 1, 0, 0]
    assert finished[1].request_id == "train-0-0-0-1~1"
    assert {request.stop_reason for request in finished} == {StopReason.ANSWERED}


async def test_the_limit_of_concurrent_requests_is_the_ranks():
    setup = WorkerSetup(tools=lambda: [FakeTool()], n=8, max_concurrent_requests=3)
    most, now = 0, Counter[str]()

    async def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        nonlocal most
        now[request_id] += 1
        most = max(most, len(+now))
        await asyncio.sleep(0.005)
        now[request_id] -= 1
        return "Bern."

    await roll_out(setup, make_scripted(script), setup.connect(2), 2)
    assert most == 3


async def test_a_wall_clock_aborts_the_call_of_the_ranks_engine():
    setup = WorkerSetup(n=2, request_timeout_s=0.2, failure=FailureConfig(max_failed_frac=1.0))
    engine = talking(1, delay_s=60.0)
    finished = await roll_out(setup, engine, setup.connect(2), 1)
    assert {request.stop_reason for request in finished} == {StopReason.WALL_CLOCK}
    assert not engine._waiting  # pyright: ignore[reportPrivateUsage]


async def test_an_abort_of_the_engine_reaches_the_request():
    setup = WorkerSetup(n=2, failure=FailureConfig(max_failed_frac=1.0))
    engine = talking(1, delay_s=60.0)
    asyncio.get_running_loop().call_later(
        0.2, lambda: asyncio.ensure_future(engine.abort("train-0-0-0-1"))
    )
    asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(engine.close()))
    finished = await roll_out(setup, engine, setup.connect(2), 1)
    assert [request.stop_reason for request in finished] == [StopReason.FAILED, StopReason.ABORTED]


async def test_an_error_that_cannot_be_sent_fails_its_own_request():
    class OddError(Exception):
        """Only this function knows its class."""

    def script(_ids: Any, _s: SamplingParams, request_id: str, turn: int) -> Answer:
        return OddError("what?") if request_id.endswith("-1") else "Bern."

    setup = WorkerSetup(n=2, failure=FailureConfig(max_failed_frac=1.0))
    finished = await roll_out(setup, make_scripted(script), setup.connect(2), 1)
    assert [request.stop_reason for request in finished] == [StopReason.ANSWERED, StopReason.FAILED]
    assert finished[1].error is not None
    assert "OddError: what?" in finished[1].error.message


async def test_a_value_that_cannot_be_sent_fails_its_own_request():
    async def run(request: AsyncRolloutRequest, context: Any, source: Any) -> AsyncRolloutRequest:
        request.columns["odd"] = (lambda: 0) if request.request_id.endswith("-1") else 7
        return await run_request(request, context, source)

    setup = WorkerSetup(run=run, n=2, failure=FailureConfig(max_failed_frac=1.0))
    finished = await roll_out(setup, talking(1), setup.connect(2), 1)
    assert [request.stop_reason for request in finished] == [StopReason.ANSWERED, StopReason.FAILED]
    assert finished[0].columns == {"odd": 7}
    assert finished[1].error is not None
    assert "cannot be sent from a rollout worker" in finished[1].error.message


# Scores.


def length_of(solution_str: str, **_: Any) -> dict[str, Any]:
    """Score by length; fail for the second sample."""
    if "-1." in solution_str:
        raise ValueError("no")
    return {"score": float(len(solution_str)), "seen": solution_str}


async def score(
    setup: WorkerSetup, pool: RolloutPool, engine: Any, number: int = 2
) -> list[AsyncRolloutRequest]:
    await pool.open()
    manager = setup.pool_manager(pool, engine)
    rewards = WorkerScores(pool, setup.make_rewards())
    try:
        return await drive_and_score(
            manager, rewards, requests_of(manager, number), on_finished=lambda _: None
        )
    finally:
        await pool.close()


async def test_workers_score_as_one_process_does():
    setup = WorkerSetup(reward=length_of, n=3)
    local = setup.local_manager(talking(1))
    expected = await drive_and_score(
        local, setup.make_rewards(), requests_of(local, 2), on_finished=lambda _: None
    )
    finished = await score(setup, setup.make_pool(setup.connect(2)), talking(1))
    for request in (*expected, *finished):  # lines of code differ
        if request._error is not None:  # pyright: ignore[reportPrivateUsage]
            request._error.traceback = ""  # pyright: ignore[reportPrivateUsage]
    assert list(map(plain, finished)) == list(map(plain, expected))
    assert [request.state for request in finished[:2]] == ["completed", "failed"]
    assert all("seconds_reward" in request.metrics for request in finished)


async def test_a_score_that_died_with_its_worker_is_computed_by_the_rank():
    setup = WorkerSetup(n=3)
    connections = setup.connect(1)
    is_first = True

    async def slow(solution_str: str, **_: Any) -> float:
        nonlocal is_first
        if is_first:
            is_first = False
            asyncio.get_running_loop().call_later(0.2, connections[0].kill)
            await asyncio.sleep(60)
        return 0.25

    setup.scorer = slow
    finished = await score(setup, setup.make_pool(connections), talking(1))
    assert [request.reward for request in finished] == [0.25] * 6


async def test_cancelled_scores_do_not_keep_the_run_waiting():
    begun = asyncio.Event()

    async def endless(**_: Any) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 0.0

    setup = WorkerSetup(reward=endless, n=2)
    scoring = asyncio.create_task(score(setup, setup.make_pool(setup.connect(1)), talking(1)))
    await asyncio.wait_for(begun.wait(), 60)
    scoring.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait([scoring])
    assert scoring.cancelled()
