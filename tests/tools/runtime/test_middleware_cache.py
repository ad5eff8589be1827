"""Calls declared pure: answered once, each asker with a copy of its own."""

import asyncio
from typing import Any

import pytest

from agentrl.errors import ToolError
from agentrl.messages import CallOutcome
from agentrl.tools import ToolResponse, ToolResult
from agentrl.tools.runtime.session import ToolSession
from tests.fakes.tools import CountingProcessTool, call
from tests.tools.runtime.test_middleware import PlayedTool, ask, ask_all, cancel_when, kinds


async def ask_with(tool: PlayedTool, **execute_kwargs: Any) -> Any:
    kwargs = {tool.name: {"execute_kwargs": execute_kwargs}}
    session = ToolSession({tool.name: tool}, instance_id="r", tools_kwargs=kwargs)
    [outcome] = await session.execute([call(tool.name)])
    return outcome


async def test_an_equal_call_is_answered_without_the_tool():
    tool = PlayedTool(cache={})
    first, second = await ask(tool, 0, x=1, y=2), await ask(tool, 1, y=2, x=1)
    assert second.response == first.response
    assert (second.reward, second.metrics) == (0.5, {"n": [1]})
    assert (first.is_cached, first.num_attempts) == (False, 1)
    assert (second.is_cached, second.num_attempts, second.seconds) == (True, 0, 0.0)
    assert len(tool.begun) == 1


@pytest.mark.parametrize(
    ("first", "second"), [({"x": 1}, {"x": 2}), ({"x": 1}, {"x": 1.0}), ({"x": 1}, {"x": True})]
)
async def test_other_arguments_are_another_call(first: dict[str, Any], second: dict[str, Any]):
    tool = PlayedTool(cache={})
    await ask(tool, **first)
    assert not (await ask(tool, **second)).is_cached


async def test_execute_kwargs_are_part_of_the_question():
    tool = PlayedTool(cache={})
    assert not (await ask_with(tool, day=1)).is_cached
    assert not (await ask_with(tool, day=2)).is_cached
    assert (await ask_with(tool, day=1)).is_cached


@pytest.mark.parametrize("value", [object(), {1: "a"}, (1, 2), float("nan")])
async def test_what_json_cannot_say_is_not_cached(value: Any):
    tool = PlayedTool(cache={})
    await ask_with(tool, x=value)
    assert not (await ask_with(tool, x=value)).is_cached
    assert len(tool.begun) == 2


async def test_each_asker_may_change_what_it_got():
    tool = PlayedTool(0.01, cache={})
    outcomes = await ask_all(tool, 3)
    for outcome in outcomes:
        assert outcome.metrics == {"n": [1]}
        outcome.metrics["n"].append(2)
    assert (await ask(tool)).metrics == {"n": [1]}
    assert len(tool.begun) == 1


@pytest.mark.parametrize("failure", [ToolError("no"), ValueError("x")])
async def test_a_failure_is_returned_to_all_waiters_and_not_cached(failure: Exception):
    class Slow(PlayedTool):
        async def _play(self, act: Any, parameters: dict[str, Any]) -> Any:
            await asyncio.sleep(0.01)
            return await super()._play(act, parameters)

    tool = Slow(failure, None, cache={})
    outcomes = await ask_all(tool, 3)
    assert len(set(kinds(outcomes))) == 1
    assert not any(outcome.outcome is CallOutcome.OK for outcome in outcomes)
    assert len(tool.begun) == 1
    assert (await ask(tool)).outcome is CallOutcome.OK


async def test_equal_calls_that_are_under_way_are_made_once():
    tool = PlayedTool(0.03, cache={})
    outcomes = await ask_all(tool, 5)
    assert kinds(outcomes) == ["ok"] * 5
    assert [outcome.is_cached for outcome in outcomes] == [False, *[True] * 4]
    assert all(outcome.queue_seconds >= 0.025 for outcome in outcomes[1:])
    assert len(tool.begun) == 1


async def test_where_the_first_is_cancelled_another_goes_in_its_place():
    tool = PlayedTool("hang", 0.01, cache={})
    first = asyncio.create_task(ask(tool, 0))
    await asyncio.sleep(0.005)
    others = [asyncio.create_task(ask(tool, i)) for i in (1, 2)]
    await asyncio.sleep(0.005)
    first.cancel()
    outcomes = await asyncio.gather(*others)
    assert kinds(outcomes) == ["ok", "ok"]
    assert [outcome.is_cached for outcome in outcomes] == [False, True]
    assert len(tool.begun) == 2


async def test_who_waits_for_an_equal_call_may_be_cancelled_alone():
    tool = PlayedTool(0.03, cache={})
    first = asyncio.create_task(ask(tool, 0))
    await cancel_when(ask(tool, 1), lambda: bool(tool.begun))
    assert (await first).outcome is CallOutcome.OK


async def test_what_cannot_be_copied_is_each_askers_own():

    class Hostile:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("not me")

    class Uncopied(PlayedTool):
        async def _play(self, act: Any, parameters: dict[str, Any]) -> Any:
            await asyncio.sleep(0.005)
            return ToolResult(ToolResponse(text="x"), metrics={"no": Hostile()})

    tool = Uncopied(cache={})
    outcomes = await ask_all(tool, 3)
    assert kinds(outcomes) == ["ok"] * 3
    assert len(tool.begun) == 3


async def test_the_oldest_answers_are_evicted_from_a_full_cache():
    tool = PlayedTool(cache={"max_entries": 2})
    for x in (1, 2, 3):
        await ask(tool, x=x)
    assert (await ask(tool, x=3)).is_cached
    assert not (await ask(tool, x=1)).is_cached


async def test_an_answer_lives_as_long_as_the_yaml_says():
    tool = PlayedTool(cache={"ttl_s": 0.05})
    await ask(tool)
    assert (await ask(tool)).is_cached
    await asyncio.sleep(0.06)
    assert not (await ask(tool)).is_cached


async def test_a_cached_answer_takes_no_place_and_is_given_while_the_service_is_down():
    tool = PlayedTool(None, ValueError("down"), cache={}, circuit_breaker={"max_failures": 1})
    await ask(tool, x=1)
    assert kinds([await ask(tool, x=2), await ask(tool, x=3)]) == ["crashed", "unavailable"]
    assert (await ask(tool, x=1)).is_cached


async def test_middleware_applies_to_tools_in_processes(tmp_path: Any):
    config = {"isolation": "process", "log": str(tmp_path / "log"), "cache": {}}
    tool = CountingProcessTool(config | {"retry": {"max_attempts": 2, "wait_jitter_s": 0}})
    session = ToolSession({"counting": tool}, instance_id="r")
    await session.create()
    try:
        first, second = [(await session.execute([call("counting", i)]))[0] for i in range(2)]
        [died] = await session.execute([call("counting", do="die")])
    finally:
        await session.release()
    assert (first.response.text, second.response.text, second.is_cached) == ("1", "1", True)
    assert (died.outcome, died.num_attempts) == (CallOutcome.CRASHED, 2)
