"""What stands round every tool: limits, retries, the breaker, and that each gives back its all."""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, ToolError
from agentrl.messages import CallOutcome
from agentrl.tools import BaseTool, ToolResult
from agentrl.tools.runtime.instance import ToolOutcome
from agentrl.tools.runtime.middleware import _handlers
from agentrl.tools.runtime.session import ToolSession
from agentrl.tools.runtime.settings import ToolSettings
from tests.fakes.raising_values import UnprintableError
from tests.fakes.tools import BlockingTool, call, schema

QUICK_RETRY = {"max_attempts": 3, "wait_initial_s": 0.001, "wait_jitter_s": 0.0}


class PlayedTool(BaseTool):
    """Plays a list of acts, one for each execution; the last is repeated. Counts what runs."""

    def __init__(self, *acts: Any, **config: Any) -> None:
        super().__init__(config, schema("played"))
        self.acts = list(acts or ["fine"])
        self.begun: list[float] = []
        self.running = self.most = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        act = self.acts[min(len(self.begun), len(self.acts) - 1)]
        self.begun.append(time.monotonic())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._play(act, parameters)
        finally:
            self.running -= 1

    async def _play(self, act: Any, parameters: dict[str, Any]) -> Any:
        match act:
            case Exception():
                raise act
            case float():
                await asyncio.sleep(act)
            case (float() as seconds, Exception() as error):
                await asyncio.sleep(seconds)
                raise error
            case "hang":
                await asyncio.Event().wait()
        return ToolResult.of((f"answer {len(self.begun)}", 0.5, {"n": [1]}), tool="played")


async def ask(tool: BaseTool, number: int = 0, *, timeout_s: float = 5.0, **args: Any) -> Any:
    """Call a tool once, in a request of its own."""
    session = ToolSession({tool.name: tool}, instance_id=f"r{number}", timeout_s=timeout_s)
    await session.create()
    try:
        [outcome] = await session.execute([call(tool.name, number, **args)])
    finally:
        await session.release()
    return outcome


async def ask_all(tool: BaseTool, number: int, **kwargs: Any) -> list[ToolOutcome]:
    return await asyncio.gather(*(ask(tool, i, **kwargs) for i in range(number)))


async def cancel_when(work: Awaitable[Any], is_time: Callable[[], bool]) -> None:
    """Begin some work, and cancel it as soon as it is time."""
    task = asyncio.ensure_future(work)
    while not is_time():  # noqa: ASYNC110 - what is waited for knows of no event
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def kinds(outcomes: list[ToolOutcome]) -> list[str]:
    return [outcome.outcome.value for outcome in outcomes]


# Retries.


async def test_a_crash_is_repeated_and_the_answer_is_as_if_there_had_been_none():
    tool = PlayedTool(ValueError("a"), None, retry=QUICK_RETRY)
    outcome = await ask(tool)
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.OK, 2)
    assert outcome.response.text == "answer 2"
    assert outcome.message == ""


async def test_each_attempt_has_the_whole_timeout_and_seconds_are_those_of_all():
    tool = PlayedTool("hang", "hang", 0.03, retry=QUICK_RETRY)
    outcome = await ask(tool, timeout_s=0.06)
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.OK, 3)
    assert 0.15 <= outcome.seconds < 0.3


async def test_attempts_end_and_the_last_failure_is_reported():
    tool = PlayedTool(ValueError("first"), ValueError("last"), retry=QUICK_RETRY)
    outcome = await ask(tool)
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.CRASHED, 3)
    assert outcome.message.startswith("ValueError: last (at test_middleware.py:")


async def test_garbage_is_repeated_as_a_crash_is():
    class Garbage(PlayedTool):
        async def _play(self, act: Any, parameters: dict[str, Any]) -> Any:
            return None if len(self.begun) == 1 else "fine"

    assert (await ask(Garbage(retry=QUICK_RETRY))).num_attempts == 2


async def test_failures_are_data_an_unprintable_failure_is_retried_as_any_other():
    outcome = await ask(PlayedTool(UnprintableError(), None, retry=QUICK_RETRY))
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.OK, 2)


async def test_a_retried_failure_is_logged_once_and_not_as_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    await ask(PlayedTool(ValueError("a"), None, retry=QUICK_RETRY))
    records = [r for r in caplog.records if r.name != "asyncio"]
    assert [r.getMessage() for r in records] == [
        "tool 'played', call call_0, attempt 1: ValueError: a"
    ]
    assert records[0].levelno == logging.INFO


async def test_failures_are_data_an_answer_that_exits_when_it_is_copied_is_not_kept():
    class Exits:
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise SystemExit(3)

    class Answers(PlayedTool):
        async def _play(self, act: Any, parameters: dict[str, Any]) -> Any:
            return "fine", None, {"what": Exits()}

    tool = Answers(cache={})
    assert kinds([await ask(tool) for _ in range(2)]) == ["ok", "ok"]
    assert len(tool.begun) == 2


async def test_a_tool_error_is_never_repeated():
    tool = PlayedTool(ToolError("no such row"), retry=QUICK_RETRY)
    outcome = await ask(tool)
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.TOOL_ERROR, 1)


async def test_nothing_is_repeated_unless_the_yaml_says_so():
    assert (await ask(PlayedTool(ValueError("x")))).num_attempts == 1


async def test_pauses_between_attempts_grow_and_count_as_queue():
    pauses = {"max_attempts": 3, "wait_initial_s": 0.05, "wait_jitter_s": 0.0}
    tool = PlayedTool(ValueError("x"), retry=pauses)
    outcome = await ask(tool)
    first, second = (b - a for a, b in zip(tool.begun, tool.begun[1:], strict=False))
    assert 0.05 <= first < 0.1 <= second
    assert outcome.queue_seconds >= 0.15 > outcome.seconds


async def test_time_in_which_the_event_loop_is_busy_counts_as_queue():
    async def block() -> None:
        await asyncio.sleep(0)  # the call begins first
        time.sleep(0.2)  # noqa: ASYNC251 - other work on the loop

    outcome, _ = await asyncio.gather(ask(PlayedTool()), block())
    assert outcome.seconds < 0.1 < outcome.queue_seconds


async def test_a_call_that_is_given_up_counts_its_time_until_then():
    outcome = await ask(PlayedTool("hang"), timeout_s=0.1)
    assert 0.1 <= outcome.seconds < 5


async def test_a_pausing_call_holds_no_place():
    slow = {"max_attempts": 2, "wait_initial_s": 0.3, "wait_jitter_s": 0.0}
    tool = PlayedTool(ValueError("x"), None, max_concurrency=1, retry=slow)
    first = asyncio.create_task(ask(tool))
    await asyncio.sleep(0.02)
    second = await ask(tool, 1)
    assert second.queue_seconds < 0.2
    assert (await first).num_attempts == 2


async def test_cancelling_a_pause_ends_the_call():
    pause = {"max_attempts": 2, "wait_initial_s": 60.0, "wait_max_s": 60.0}
    tool = PlayedTool(ValueError("x"), retry=pause)
    await cancel_when(ask(tool), lambda: bool(tool.begun))
    assert len(tool.begun) == 1


# Limits.


async def test_no_more_calls_run_at_once_than_may_over_all_requests():
    tool = PlayedTool(0.02, max_concurrency=2)
    outcomes = await ask_all(tool, 6)
    assert kinds(outcomes) == ["ok"] * 6
    assert tool.most == 2


async def test_the_timeout_starts_after_the_queue_and_queue_time_is_separate():
    tool = PlayedTool(0.05, max_concurrency=1)
    outcomes = await ask_all(tool, 4, timeout_s=0.1)
    assert kinds(outcomes) == ["ok"] * 4
    assert outcomes[3].queue_seconds > 0.14
    assert all(0.05 <= outcome.seconds < 0.1 for outcome in outcomes)


async def test_waiting_for_the_requests_own_slots_is_queue_time():
    tool = PlayedTool(0.05)
    session = ToolSession({"played": tool}, instance_id="r", max_parallel_calls=1)
    first, second = await session.execute([call("played", 0), call("played", 1)])
    assert first.queue_seconds < 0.03 < 0.05 <= second.queue_seconds


async def test_a_place_is_given_back_by_each_ending():
    acts = [ValueError("x"), ToolError("y"), "hang", None, None]
    tool = PlayedTool(*acts, max_concurrency=1)
    outcomes = await ask_all(tool, 5, timeout_s=0.03)
    assert kinds(outcomes) == ["crashed", "tool_error", "timeout", "ok", "ok"]


async def test_calls_begin_no_faster_than_the_rate_says():
    tool = PlayedTool(rate_limit={"calls": 2, "per_s": 0.2})
    started = time.monotonic()
    await ask_all(tool, 4)
    begun = [at - started for at in tool.begun]
    assert begun[1] < 0.09
    assert begun[2] >= 0.095
    assert begun[3] >= 0.195


@pytest.mark.parametrize(
    ("rate", "calls", "per_s"), [(5, 5.0, 1.0), (0.25, 1.0, 4.0), (2.5, 2.5, 1.0)]
)
def test_a_bare_rate_is_calls_per_second(rate: float, calls: float, per_s: float):
    limit = ToolSettings.check({"rate_limit": rate}).rate_limit
    assert limit is not None
    assert (limit.calls, limit.per_s) == (calls, per_s)


@pytest.mark.parametrize(
    "limit", [{"max_concurrency": 1}, {"rate_limit": {"calls": 1, "per_s": 0.05}}]
)
async def test_a_call_cancelled_in_a_queue_takes_nothing_with_it(limit: dict[str, Any]):
    tool = PlayedTool(0.03, **limit)
    first = asyncio.create_task(ask(tool))
    await asyncio.sleep(0.005)
    waiting = [asyncio.create_task(ask(tool, i)) for i in range(1, 5)]
    await asyncio.sleep(0.005)
    for task in waiting[:3]:
        task.cancel()
    assert (await first).outcome is CallOutcome.OK
    async with asyncio.timeout(15):
        assert (await waiting[3]).outcome is CallOutcome.OK
        assert (await ask(tool)).outcome is CallOutcome.OK
    assert len(tool.begun) == 3


async def test_a_call_cancelled_at_work_gives_its_place_back():
    tool = PlayedTool("hang", None, max_concurrency=1)
    await cancel_when(ask(tool), lambda: bool(tool.begun))
    async with asyncio.timeout(15):
        assert (await ask(tool)).outcome is CallOutcome.OK


def test_a_tool_serves_one_event_loop_after_another():
    tool = PlayedTool(
        0.002, max_concurrency=1, rate_limit=1000, cache={}, circuit_breaker={}, retry=QUICK_RETRY
    )
    for _ in range(4):
        assert kinds(asyncio.run(ask_all(tool, 4))) == ["ok"] * 4
    assert len(_handlers[id(tool)]._by_loop) == 1, "loops that are closed are forgotten"


def test_the_middleware_of_a_tool_is_released_with_it():
    tool = PlayedTool(max_concurrency=1)
    number = id(tool)
    asyncio.run(ask_all(tool, 2))
    assert number in _handlers
    del tool
    gc.collect()
    assert number not in _handlers


# The circuit breaker.


async def test_the_breaker_opens_after_so_many_failures_in_a_row():
    acts = [ValueError("x"), ValueError("x"), None, ValueError("x")]
    tool = PlayedTool(*acts, circuit_breaker={"max_failures": 3})
    found = [await ask(tool) for _ in range(8)]
    assert kinds(found) == ["crashed", "crashed", "ok", *["crashed"] * 3, *["unavailable"] * 2]
    assert len(tool.begun) == 6
    refused = found[-1]
    assert refused.is_infrastructure_failure
    assert refused.response.text == "Error: tool 'played' is not available at the moment"
    assert (refused.num_attempts, refused.seconds) == (0, 0.0)


async def test_time_outs_open_the_breaker_and_tool_errors_do_not():
    late = PlayedTool("hang", circuit_breaker={"max_failures": 1})
    assert kinds([await ask(late, timeout_s=0.02) for _ in range(2)]) == ["timeout", "unavailable"]
    answers = PlayedTool(ToolError("no"), circuit_breaker={"max_failures": 1})
    assert kinds([await ask(answers) for _ in range(3)]) == ["tool_error"] * 3


async def test_one_call_tries_when_the_time_is_up_and_the_others_are_refused():
    breaker = {"max_failures": 1, "reset_s": 0.05}
    tool = PlayedTool(ValueError("x"), 0.03, None, circuit_breaker=breaker)
    await ask(tool)
    await asyncio.sleep(0.06)
    outcomes = await ask_all(tool, 4)
    assert kinds(outcomes) == ["ok", *["unavailable"] * 3]
    assert kinds(await ask_all(tool, 3)) == ["ok"] * 3


async def test_a_try_that_fails_opens_the_breaker_again():
    breaker = {"max_failures": 2, "reset_s": 0.05}
    tool = PlayedTool(*[ValueError("x")] * 3, None, circuit_breaker=breaker)
    await ask_all(tool, 2)
    await asyncio.sleep(0.06)
    assert kinds([await ask(tool) for _ in range(2)]) == ["crashed", "unavailable"]
    await asyncio.sleep(0.06)
    assert kinds([await ask(tool)]) == ["ok"]


async def test_a_try_that_is_cancelled_leaves_it_to_the_next():
    breaker = {"max_failures": 1, "reset_s": 0.03}
    tool = PlayedTool(ValueError("x"), "hang", None, circuit_breaker=breaker)
    await ask(tool)
    await asyncio.sleep(0.04)
    await cancel_when(ask(tool), lambda: len(tool.begun) == 2)
    assert kinds([await ask(tool) for _ in range(2)]) == ["ok", "ok"]


async def test_what_began_before_the_breaker_opened_does_not_close_or_open_it():
    breaker = {"max_failures": 1, "reset_s": 0.1}
    late = (0.25, ValueError("late"))
    tool = PlayedTool(0.05, late, ValueError("x"), 0.15, None, circuit_breaker=breaker)
    early = [asyncio.create_task(ask(tool, i)) for i in range(2)]
    await asyncio.sleep(0.005)
    await ask(tool, 2)
    assert (await early[0]).outcome is CallOutcome.OK
    assert (await ask(tool, 3)).outcome is CallOutcome.UNAVAILABLE, (
        "the early answer does not close it"
    )
    await asyncio.sleep(0.1)
    trying = asyncio.create_task(ask(tool, 4))
    assert (await early[1]).outcome is CallOutcome.CRASHED
    assert (await ask(tool, 5)).outcome is CallOutcome.UNAVAILABLE, "the try is still under way"
    assert (await trying).outcome is CallOutcome.OK
    assert (await ask(tool, 6)).outcome is CallOutcome.OK, "the late failure does not open it again"


async def test_who_queued_before_the_breaker_opened_is_refused_when_it_is_its_turn():
    tool = PlayedTool("hang", max_concurrency=1, circuit_breaker={"max_failures": 1})
    outcomes = await ask_all(tool, 4, timeout_s=0.05)
    assert kinds(outcomes) == ["timeout", *["unavailable"] * 3]
    assert max(outcome.queue_seconds for outcome in outcomes) < 0.15


async def test_attempts_that_open_the_breaker_are_reported_and_not_the_refusal():
    tool = PlayedTool(ValueError("down"), retry=QUICK_RETRY, circuit_breaker={"max_failures": 2})
    outcome = await ask(tool)
    assert (outcome.outcome, outcome.num_attempts) == (CallOutcome.CRASHED, 2)
    assert outcome.message.startswith("ValueError: down (at test_middleware.py:")


# All together.


async def test_middleware_applies_to_tools_on_threads():
    tool = BlockingTool({"isolation": "thread", "block_s": 0.02, "max_concurrency": 1})
    outcomes = await ask_all(tool, 3)
    assert kinds(outcomes) == ["ok"] * 3
    assert max(outcome.queue_seconds for outcome in outcomes) >= 0.04


ACTS = st.sampled_from(["fine", "hang", 0.002, ValueError("x"), ToolError("y")])


@given(
    acts=st.lists(ACTS, min_size=1, max_size=6),
    concurrency=st.sampled_from([None, 1, 2]),
    retry=st.sampled_from([None, QUICK_RETRY]),
    cache=st.sampled_from([None, {}]),
    breaker=st.sampled_from([None, {"max_failures": 2, "reset_s": 0.01}]),
    cancel_after=st.lists(st.integers(0, 12), max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_failures_are_data_no_ending_of_one_call_costs_the_tool_a_place(
    acts: list[Any],
    concurrency: int | None,
    retry: Any,
    cache: Any,
    breaker: Any,
    cancel_after: list[int],
):
    config = {
        "max_concurrency": concurrency,
        "retry": retry,
        "cache": cache,
        "circuit_breaker": breaker,
    }
    tool = PlayedTool(*acts, None, **config)

    async def main() -> None:
        tasks = [asyncio.create_task(ask(tool, i, timeout_s=0.01, x=i % 2)) for i in range(6)]
        for task, turns in zip(tasks, cancel_after, strict=False):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ToolOutcome | asyncio.CancelledError) for end in done)
        tool.acts, tool.begun = ["fine"], []
        await asyncio.sleep(0.02)
        assert kinds([await ask(tool, 9, x=9) for _ in range(2)]) == ["ok", "ok"]

    asyncio.run(main())
    assert concurrency is None or tool.most <= concurrency
    assert tool.running == 0


@pytest.mark.parametrize(
    ("config", "key", "message"),
    [
        ({"retry": {"max_attempt": 3}}, "retry.max_attempt", "did you mean 'max_attempts'"),
        ({"retry": {"max_attempts": 0}}, "retry.max_attempts", "at least 1"),
        ({"retry": 3}, "retry", "a mapping with max_attempts"),
        ({"max_concurrency": 0}, "max_concurrency", "at least 1"),
        ({"rate_limit": 0}, "rate_limit", "more than 0"),
        ({"rate_limit": {"call": 2}}, "rate_limit.call", "did you mean 'calls'"),
        ({"rate_limit": {"per_s": 2}}, "rate_limit.calls", "at least 1"),
        ({"cache": {"size": 3}}, "cache.size", "one of max_entries, ttl_s"),
        ({"cache": True}, "cache", "a mapping of max_entries"),
        ({"circuit_breaker": {"reset_s": -1}}, "circuit_breaker.reset_s", "more than 0"),
    ],
)
def test_a_wrong_key_of_a_guard_says_which_and_what_was_expected(
    config: dict[str, Any], key: str, message: str
):
    with pytest.raises(ConfigError) as error:
        ToolSettings.check(config, file="tools.yaml", key="tools[0].config")
    assert error.value.details["key"] == f"tools[0].config.{key}"
    assert message in str(error.value)


def test_what_agentrl_does_not_know_is_the_tools_own():
    assert not ToolSettings.check({"retries": 3, "anything": {"x": 1}}).has_middleware
