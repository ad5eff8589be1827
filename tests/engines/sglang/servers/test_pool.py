"""Calls on several servers: where they go, and what becomes of them when servers fail."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest

import agentrl.engines.sglang.servers.pool
from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    MemoryTag,
    SamplingParams,
    SyncFigures,
)
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.weights.sync import UpdateParticipants
from agentrl.errors import EngineError
from tests.fakes.sglang_servers import FakeSGLang, expected_ids, running, until

PROMPT = [3, 1, 4, 1, 5]


class FakeTransport:
    """Brings nothing, in two steps."""

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[Any]
    ) -> SyncFigures:
        assert list(named_tensors) == []
        await participants.request("begin_weight_update")
        await participants.request("end_weight_update")
        return SyncFigures()

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeSGLang, FakeSGLang]]:
    one, two = FakeSGLang(), FakeSGLang()
    async with running(one, two):
        yield one, two


class Opened:
    """Engines that are closed with the test."""

    def __init__(self) -> None:
        self._engines: list[SGLangServerEngine] = []

    def __call__(self, *servers: FakeSGLang, **settings: Any) -> SGLangServerEngine:
        short = {"health_interval_s": 30, "health_timeout_s": 0.4, "request_timeout_s": 20}
        config = SGLangServerConfig(
            addresses=[server.address for server in servers], **(short | settings)
        )
        engine = SGLangServerEngine(
            config,
            lambda ids: " ".join(map(str, ids)),
            max_model_len=500,
            transport=FakeTransport(),
        )
        self._engines.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


@pytest.fixture
async def connect() -> AsyncIterator[Opened]:
    opened = Opened()
    yield opened
    await opened.close()


async def ask(
    engine: Engine, request_id: str = "a", *, ids: Sequence[int] = PROMPT, number: int = 6
) -> Completion:
    return await engine.generate(ids, SamplingParams(max_new_tokens=number), request_id=request_id)


def start(engine: Engine, *request_ids: str, number: int = 6) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(ask(engine, name, number=number)) for name in request_ids]


def is_exact(completion: Completion, ids: Sequence[int] = PROMPT, number: int = 6) -> bool:
    return completion.token_ids == expected_ids(ids, number)


def conversation_of(call: dict[str, Any]) -> str:
    return call["rid"].partition("-")[2].split("/")[0]


def out(engine: SGLangServerEngine) -> dict[str, str]:
    return {m.name: m.problem for m in engine.pool.servers if m.problem is not None}


# Placement.


async def test_a_conversation_stays_on_its_server_and_new_ones_go_to_the_least_loaded(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    engine = connect(*pair)
    for order in ("abcdefgh", "hgfedcba", "cbadehgf"):
        await asyncio.gather(*start(engine, *order))
    homes = [Counter(conversation_of(call) for call in server.calls()) for server in pair]
    assert [len(home) for home in homes] == [4, 4]
    assert all(set(home.values()) == {3} for home in homes)


async def test_a_new_conversation_goes_where_fewest_calls_run(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two)
    one.is_holding = True
    held, free = start(engine, "a", "b")
    await free
    for name in "cdef":
        await ask(engine, name)
    assert len(one.calls()) == 1
    one.release_all()
    await held


async def test_names_of_calls_inside_sglang_begin_with_no_other_running_name(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    engine = connect(*pair)
    await asyncio.gather(*start(engine, *(f"{n}" for n in range(12))), *start(engine, "1", "1"))
    names = [call["rid"] for server in pair for call in server.calls()]
    assert len(names) == 14
    assert not [(a, b) for a in names for b in names if a is not b and b.startswith(a)]


# Servers that fail.


async def test_calls_of_a_killed_server_are_asked_of_another_with_the_same_ids(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two)
    one.is_holding = two.is_holding = True
    tasks = start(engine, *"abcdefgh")
    await until(lambda: (one.num_waiting, two.num_waiting) == (4, 4))
    await one.kill()
    await until(lambda: two.num_waiting == 8)
    two.release_all()
    assert all(is_exact(completion) for completion in await asyncio.gather(*tasks))
    assert list(out(engine)) == [one.address]
    moved = {conversation_of(call) for call in one.calls()}
    assert {tuple(call["input_ids"]) for call in two.calls()} == {tuple(PROMPT)}
    assert len(moved) == 4


async def test_a_call_that_had_got_tokens_goes_on_from_them_on_another_server(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    one.stops_after = two.stops_after = 4
    engine = connect(one, two)

    def hang_at_the_second(_: dict[str, Any]) -> None:
        if len(one.calls()) == 2:
            one.is_holding = True

    one.on_generate = hang_at_the_second
    task = start(engine, "a", number=10)[0]
    await until(lambda: one.num_waiting == 1)
    await one.kill()
    completion = await task
    assert is_exact(completion, number=10)
    assert [span[1:] for span in completion.weight_versions] == [(0, 10)]
    assert [len(call["input_ids"]) for call in two.calls()] == [9, 13]


async def test_without_a_server_the_error_names_each_and_what_is_wrong_with_it(connect: Opened):
    dead, late, short = FakeSGLang(), FakeSGLang(hanging={"health"}), FakeSGLang(max_input=100)
    async with running(dead, late, short):
        engine = connect(dead, late, short, max_retries=1, health_timeout_s=0.1)
        await dead.kill()
        with pytest.raises(EngineError, match="no SGLang server is available") as raised:
            await ask(engine)
        message = str(raised.value)
        assert f"{dead.address} does not answer: no connection" in message
        assert f"{late.address} has not answered /health for 0.1 s" in message
        assert message.count(dead.address) == message.count(late.address) == 1
        assert (
            f"{short.address}: it takes inputs of at most 100 tokens, the run needs 499" in message
        )
        await dead.start()


async def test_addresses_at_which_nothing_ever_answered_are_the_run_file_s_mistake(
    connect: Opened,
):
    never = FakeSGLang()
    async with running(never):
        engine = connect(never)
        await never.kill()
        with pytest.raises(EngineError, match="no SGLang server answers") as raised:
            await engine.update_weights([], version=1)
        message = str(raised.value)
        assert message.count(never.address) == 1
        assert "agentrl serve" in message
        assert raised.value.details["key"] == "rollout.engine.sglang_server.addresses"
        await never.start()


async def test_a_dead_server_is_reported_once_with_the_one_that_takes_its_requests(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened, caplog: pytest.LogCaptureFixture
):
    engine = connect(*pair)
    await ask(engine)
    await asyncio.gather(*(server.kill() for server in pair))
    with pytest.raises(EngineError, match="no SGLang server is available"):
        await engine.follow_update(version=1)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{pair[0].address} has ended: no connection")
    assert first.endswith("; its requests go to the others")
    assert last.startswith(f"{pair[1].address} has ended: no connection")
    assert "requests" not in last, "there are no others"
    for server in pair:
        await server.start()


async def test_the_only_server_killed_under_a_call_is_a_clear_error(connect: Opened):
    only = FakeSGLang(is_holding=True)
    async with running(only):
        engine = connect(only, max_retries=1)
        tasks = start(engine, *"abc")
        await until(lambda: only.num_waiting == 3)
        await only.kill()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert only.address in str(error)
        await only.start()
        only.is_holding = False
        assert is_exact(await ask(engine)), "it is looked at again when it is needed"


async def test_a_server_that_hangs_is_found_by_its_health_and_its_calls_move(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two, health_interval_s=0.05, health_timeout_s=0.05)
    one.is_holding = True
    tasks = start(engine, "a", "b")
    await until(lambda: one.num_waiting == 1)
    one.hanging = {"health", "generate"}
    assert all(is_exact(completion) for completion in await asyncio.gather(*tasks))
    assert list(out(engine)) == [one.address]
    one.hanging, one.is_holding = set(), False
    await until(lambda: not out(engine))


async def test_one_late_look_is_no_reason_to_go_out(connect: Opened):
    slow = FakeSGLang()
    async with running(slow):
        engine = connect(slow, health_timeout_s=0.1)
        await ask(engine)
        slow.hanging = {"health"}
        asyncio.get_running_loop().call_later(0.05, slow.hanging.clear)
        await engine.pool.check(engine.pool.servers[0])
        assert not out(engine)


async def test_a_look_that_an_update_crossed_says_nothing(connect: Opened):
    paused = FakeSGLang()
    async with running(paused):
        engine = connect(paused, health_timeout_s=0.1)
        await ask(engine)
        paused.hanging = {"health"}
        looking = asyncio.create_task(engine.pool.check(engine.pool.servers[0]))
        await until(lambda: paused.asked[-1][0] == "health")
        await engine.update_weights([], version=1)
        await looking
        assert not out(engine)


async def test_a_late_server_goes_out_and_the_others_are_unaffected(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two, request_timeout_s=0.2)
    one.hanging = {"generate"}
    completions = await asyncio.gather(*start(engine, *"abcdef"))
    assert all(map(is_exact, completions))
    assert "has not answered /generate for 0.2 s" in out(engine)[one.address]
    assert len(two.calls()) == 6
    assert "abort_request" in one.routes(), "the server is told that nobody waits"


async def test_one_late_call_moves_alone_where_its_server_answers_others(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two, request_timeout_s=0.3)
    one.is_holding = two.is_holding = True
    late, _ = tasks = start(engine, "late", "b")
    await until(lambda: one.num_waiting == two.num_waiting == 1)
    one.is_holding = False
    two.release_all()
    while not late.done():
        await ask(engine, "c")
        await ask(engine, "d")
        await asyncio.sleep(0.01)
    assert all(map(is_exact, await asyncio.gather(*tasks)))
    assert not out(engine)


async def test_a_server_that_answers_with_failures_is_asked_again_elsewhere(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, _ = pair
    one.failing = {"generate": 503}
    assert all(map(is_exact, await asyncio.gather(*start(connect(*pair), *"abcd"))))


async def test_failures_everywhere_end_the_call_with_what_each_said(connect: Opened):
    only = FakeSGLang(failing={"generate": 500})
    async with running(only):
        with pytest.raises(EngineError, match=r"has failed 2 times(?s:.*)no generate today"):
            await ask(connect(only, max_retries=1))


async def test_a_refused_call_fails_alone_and_is_not_asked_again(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    for server in pair:
        server.failing = {"generate": 400}
    engine = connect(*pair)
    with pytest.raises(EngineError, match=r"refused /generate \(400\): no generate today"):
        await ask(engine)
    assert sum(len(server.calls()) for server in pair) == 1
    assert not out(engine)


# Ending calls.


async def test_a_cancelled_call_is_aborted_on_its_server(connect: Opened):
    only = FakeSGLang(is_holding=True)
    async with running(only):
        task = start(connect(only), "a")[0]
        await until(lambda: only.num_waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "abort_request" in only.routes())
        assert only.asked[-1][1]["rid"] == only.calls()[0]["rid"]


async def test_abort_returns_what_was_sampled(connect: Opened):
    only = FakeSGLang(is_holding=True)
    async with running(only):
        engine = connect(only)
        goes, stays = start(engine, "goes", "stays")
        await until(lambda: only.num_waiting == 2)
        await engine.abort("goes")
        completion = await goes
        assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.ABORT, 2)
        only.release_all()
        assert is_exact(await stays)


async def test_abort_ends_a_call_that_waits_for_a_server(connect: Opened):
    only = FakeSGLang()
    async with running(only):
        engine = connect(only)
        await ask(engine)
        await engine.sleep()
        waiting = start(engine, "a")[0]
        await asyncio.sleep(0.01)
        await engine.abort("a")
        assert (await waiting).finish_reason == FinishReason.ABORT
        await engine.wake()


async def test_abort_ends_a_call_whose_server_is_silent(connect: Opened):
    only = FakeSGLang()
    async with running(only):
        engine = connect(only, health_timeout_s=0.1)
        await ask(engine)
        only.hanging = {"generate", "abort_request"}
        task = start(engine, "a")[0]
        await until(lambda: len(only.calls()) == 2)
        await engine.abort("a")
        assert (await task).token_ids == []


async def test_close_ends_running_calls_and_leaves_the_server_alone(connect: Opened):
    only = FakeSGLang(is_holding=True)
    async with running(only):
        engine = connect(only)
        task = start(engine, "a")[0]
        await until(lambda: only.num_waiting == 1)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        assert set(only.routes()) <= {"abort_request"}


# Weights.


async def test_an_update_reaches_every_server_while_new_calls_wait(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    engine = connect(*pair)
    update = asyncio.create_task(engine.update_weights([], version=3))
    await asyncio.sleep(0)
    completion = await ask(engine)
    assert [server.version for server in pair] == ["3", "3"]
    assert completion.weight_version == 3
    await update
    assert [server.routes() for server in pair] == 2 * [
        [
            "pause_generation",
            "update_weight_version",
            "begin_weight_update",
            "end_weight_update",
            "update_weight_version",
            "continue_generation",
        ]
    ]


async def test_a_server_whose_update_failed_gets_no_calls_until_one_succeeds(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    engine = connect(one, two, health_interval_s=0.02)
    await asyncio.gather(*start(engine, "a", "b"))
    one.failing = {"end_weight_update": 500}
    await engine.update_weights([], version=1)
    one.failing = {}
    num_calls = len(one.calls())
    num_looks = [route for route, _ in one.asked].count("model_info")
    await until(lambda: [route for route, _ in one.asked].count("model_info") > num_looks + 1)
    assert "may hold a mixture" in out(engine)[one.address]
    completions = await asyncio.gather(*start(engine, *"abcd"))
    assert {completion.weight_version for completion in completions} == {1}
    assert len(one.calls()) == num_calls
    await engine.update_weights([], version=2)
    assert not out(engine)
    completions = await asyncio.gather(*start(engine, *"efgh"))
    assert {completion.weight_version for completion in completions} == {2}
    assert len(one.calls()) > num_calls


async def test_where_an_update_fails_everywhere_no_call_is_taken_until_one_succeeds(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    engine = connect(*pair, max_retries=0)
    for server in pair:
        server.failing = {"begin_weight_update": 500}
    with pytest.raises(EngineError, match="no begin_weight_update today"):
        await engine.update_weights([], version=1)
    with pytest.raises(EngineError, match="may hold a mixture"):
        await ask(engine)
    for server in pair:
        server.failing = {}
    await engine.update_weights([], version=1)
    assert (await ask(engine)).weight_version == 1


@pytest.mark.parametrize("version", [0, 4])
async def test_a_restarted_server_is_used_again_after_the_next_update(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened, version: int
):
    one, two = pair
    engine = connect(one, two, health_interval_s=0.02)
    await engine.update_weights([], version=version)
    await one.kill()
    await until(lambda: one.address in out(engine))
    await one.start()
    await until(lambda: "not the run's" in out(engine)[one.address])
    await engine.update_weights([], version=version + 1)
    assert not out(engine)
    assert {c.weight_version for c in await asyncio.gather(*start(engine, *"abcd"))} == {
        version + 1
    }
    assert one.calls()


async def test_another_rank_sees_who_missed_an_update(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agentrl.engines.sglang.servers.pool, "IDLE_S", 0.0)
    one, _ = pair
    main, other = connect(*pair), connect(*pair)
    assert not {c.weight_version for c in await asyncio.gather(*start(other, "a", "b"))} - {0}
    one.failing = {"begin_weight_update": 500}
    await main.update_weights([], version=1)
    num_calls = len(one.calls())
    assert {c.weight_version for c in await asyncio.gather(*start(other, "a", "b"))} == {1}
    assert len(one.calls()) == num_calls
    assert "is incomplete" in out(other)[one.address]
    one.failing = {}
    await main.update_weights([], version=2)
    await other.pool._check_all()
    assert not out(other)


async def test_another_rank_follows_an_update_whatever_the_versions_were_before(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, two = pair
    one.version = two.version = "7"  # of a run that went further
    main, other = connect(*pair), connect(*pair)
    await asyncio.gather(*start(other, "a", "b"))
    one.failing = {"pause_generation": 500}
    await main.update_weights([], version=7)
    await other.follow_update(version=7)
    one.failing, num_calls = {}, len(one.calls())
    assert all(map(is_exact, await asyncio.gather(*start(other, *"cdef"))))
    assert len(one.calls()) == num_calls
    assert list(out(other)) == [one.address]


async def test_following_an_update_that_no_server_has_is_an_error(connect: Opened):
    only = FakeSGLang()
    async with running(only):
        with pytest.raises(EngineError, match="no SGLang server is available"):
            await connect(only).follow_update(version=1)


@pytest.mark.slow
async def test_what_an_update_left_half_done_gets_no_calls_of_anybody_who_comes_later(
    connect: Opened,
):
    only = FakeSGLang()
    async with running(only):
        await connect(only).update_weights([], version=0)
        killed = asyncio.create_task(connect(only).update_weights([], version=0))
        only.hanging = {"begin_weight_update"}
        await until(lambda: only.version == "-1")
        only.hanging, only.failing = set(), {"begin_weight_update": 500}
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        only.failing = {}
        later = connect(only, max_retries=0)
        with pytest.raises(EngineError, match="is incomplete"):
            await ask(later)
        await later.update_weights([], version=0)
        assert (await ask(later)).weight_version == 0


async def test_a_server_with_an_interrupted_update_is_detected_without_a_wait(
    connect: Opened,
):
    only = FakeSGLang()
    async with running(only), asyncio.timeout(5):
        only.version, only.is_paused = "-1", True
        engine = connect(only, max_retries=0)
        with pytest.raises(EngineError, match="is incomplete"):
            await ask(engine)
        await engine.update_weights([], version=0)
        assert is_exact(await ask(engine))


async def test_what_was_sampled_by_half_of_an_update_is_asked_of_another(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, _ = pair
    engine = connect(*pair)
    await asyncio.gather(*start(engine, "a", "b"))
    one.version = "-1"
    completions = await asyncio.gather(*start(engine, *"ab"))
    assert {completion.weight_version for completion in completions} == {0}
    assert "is incomplete" in out(engine)[one.address]


async def test_an_interrupted_update_is_ended_first(connect: Opened):
    only = FakeSGLang(has_open_update=True)
    async with running(only):
        await connect(only).update_weights([], version=1)
        updates = [route for route in only.routes() if route.endswith("weight_update")]
        begin, end = "begin_weight_update", "end_weight_update"
        assert updates == [begin, end, begin, end]


# Sleep.


async def test_a_sleep_that_fails_everywhere_lets_calls_go_on(connect: Opened):
    gpu = FakeSGLang(device="cuda", failing={"release_memory_occupation": 500})
    async with running(gpu):
        engine = connect(gpu)
        await ask(engine)
        with pytest.raises(EngineError, match="no release_memory_occupation today"):
            await engine.sleep()
        assert not gpu.is_paused
        assert is_exact(await ask(engine))


async def test_a_server_that_does_not_wake_is_woken_before_it_gets_calls(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, _ = pair
    one.device = "cuda"
    engine = connect(*pair)
    await asyncio.gather(*start(engine, "a", "b"))
    await engine.sleep()
    one.failing = {"resume_memory_occupation": 500}
    await engine.wake()
    assert all(map(is_exact, await asyncio.gather(*start(engine, "a", "b"))))
    await engine.pool._check_all()
    assert list(out(engine)) == [one.address]
    one.failing = {}
    await engine.pool._check_all()
    assert not out(engine)
    assert not one.is_paused


async def test_a_server_that_went_out_in_its_sleep_is_woken_with_the_others(
    pair: tuple[FakeSGLang, FakeSGLang], connect: Opened
):
    one, _ = pair
    one.device = "cuda"
    engine = connect(*pair)
    await ask(engine)
    await engine.sleep()
    engine.pool.mark_unavailable(engine.pool.servers[0], "for a test")
    await engine.wake()
    assert one.routes()[-2:] == ["resume_memory_occupation", "continue_generation"]


async def test_generation_goes_on_where_a_flush_fails(connect: Opened):
    only = FakeSGLang(failing={"flush_cache": 500})
    async with running(only):
        engine = connect(only)
        await ask(engine)
        with pytest.raises(EngineError, match="no flush_cache today"):
            await engine.flush_cache()
        assert not only.is_paused


async def test_calls_wait_while_the_servers_sleep_and_what_cannot_sleep_is_left_alone(
    connect: Opened,
):
    cpu, gpu = FakeSGLang(), FakeSGLang(device="cuda")
    async with running(cpu, gpu):
        engine = connect(cpu, gpu)
        await ask(engine)
        await engine.sleep([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
        waiting = start(engine, "b", "c")
        await engine.wake([MemoryTag.WEIGHTS])
        await engine.update_weights([], version=1)
        assert gpu.is_paused
        assert not any(task.done() for task in waiting)
        await engine.wake([MemoryTag.KV_CACHE])
        assert {c.weight_version for c in await asyncio.gather(*waiting)} == {1}
        memory = [(r, f["tags"]) for r, f in gpu.asked if r.endswith("memory_occupation")]
        assert memory == [
            ("release_memory_occupation", ["weights", "kv_cache"]),
            ("resume_memory_occupation", ["weights"]),
            ("resume_memory_occupation", ["kv_cache"]),
        ]
        assert not [route for route in cpu.routes() if route.endswith("memory_occupation")]


async def test_flush_reaches_every_server(pair: tuple[FakeSGLang, FakeSGLang], connect: Opened):
    engine = connect(*pair)
    await ask(engine)
    await engine.flush_cache()
    expected = ["pause_generation", "flush_cache", "continue_generation"]
    assert [server.routes() for server in pair] == [expected, expected]


# Addresses.


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://node-1:30000/", "http://node-1:30000"),
        ("https://10.0.0.5:443", "https://10.0.0.5:443"),
        ("[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_an_address_needs_no_scheme(given: str, read: str):
    assert SGLangServerConfig(addresses=[given]).addresses == [read]


async def test_servers_with_a_key_answer_those_who_send_it(connect: Opened):
    async with running(server := FakeSGLang(api_key="k-1f6c0d")):
        assert is_exact(await ask(connect(server, api_key="k-1f6c0d"), "a"))
        with pytest.raises(EngineError, match="refused the key of this run"):
            await ask(connect(server, api_key="another", max_retries=0), "a")


@pytest.mark.parametrize("given", ["node-1", "ftp://a:1", "http://a:b", "a:1?x=2", ""])
def test_what_is_no_address_is_refused(given: str):
    with pytest.raises(ValueError, match="is no address such as"):
        SGLangServerConfig(addresses=[given])


def test_an_address_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        SGLangServerConfig(addresses=["a:1", "http://a:1/"])
