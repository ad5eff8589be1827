# pyright: reportIncompatibleMethodOverride=false
"""The life of tools in one request: "plug-in life cycle", and one failure is one failure."""

import asyncio
import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError, ToolError, ToolLifeError
from agentrl.messages import CallOutcome, ToolResponse
from agentrl.tools import BaseTool, ToolResult
from agentrl.tools.runtime.session import ToolSession
from tests.fakes.raising_values import UNPRINTABLE_MESSAGE, ExitsWhenRead, UnprintableError
from tests.fakes.tools import BEHAVIOURS, FlakyTool, call, schema


def session_of(*tools: BaseTool, timeout_s: float = 5.0, **kwargs: Any) -> ToolSession:
    return ToolSession(
        {tool.name: tool for tool in tools}, instance_id="r", timeout_s=timeout_s, **kwargs
    )


class AnyTool(BaseTool):
    """Returns what it is told to."""

    def __init__(self, value: Any, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {}, schema("any"))
        self.value = value

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        return self.value


async def executed(tool: BaseTool, **kwargs: Any) -> Any:
    session = session_of(tool, **kwargs)
    await session.create()
    [outcome] = await session.execute([call(tool.name)])
    await session.release()
    return outcome


@pytest.mark.parametrize(
    "value",
    [
        "hi",
        ToolResponse(text="hi"),
        ("hi",),
        (ToolResponse(text="hi"), 0.0),
        (ToolResponse(text="hi"), None, {}),
        ToolResult(ToolResponse(text="hi")),
    ],
)
async def test_whatever_users_return_is_accepted(value: Any):
    outcome = await executed(AnyTool(value))
    assert outcome.outcome is CallOutcome.OK
    assert outcome.response.text == "hi"
    assert outcome.metrics == {}


async def test_a_dict_is_shown_as_json():
    assert (await executed(AnyTool({"größe": 1}))).response.text == '{"größe": 1}'


async def test_a_megabyte_passes_whole():
    assert len((await executed(AnyTool("x" * 2**20))).response.text) == 2**20


@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        3,
        object(),
        ("a", 0.0, {}, False, 1),
        ("a", 0.0, {}, False),
        (None, 0.0),
        ("a", "much"),
        ("a", float("nan")),
        ("a", 0.0, "metrics"),
        ("a", 0.0, {1: "a name that is none"}),
        {"self": object()},
    ],
)
async def test_garbage_is_a_crash_of_the_tool_that_the_model_sees_neutrally(value: Any):
    outcome = await executed(AnyTool(value))
    assert outcome.outcome is CallOutcome.CRASHED
    assert outcome.is_infrastructure_failure
    assert outcome.response.text == "Error executing tool 'any': internal error"
    assert outcome.message.startswith(("TypeError", "ValueError"))


@pytest.mark.parametrize(
    "value",
    [
        ExitsWhenRead(),
        ("a", ExitsWhenRead()),
        ("a", 0.0, ExitsWhenRead()),
        ToolResult(ToolResponse(text="a"), should_stop=ExitsWhenRead()),  # type: ignore[arg-type]
    ],
)
async def test_failures_are_data_an_answer_that_exits_when_it_is_read_is_a_crash_of_the_tool(
    value: Any,
):
    outcome = await executed(AnyTool(value))
    assert outcome.outcome is CallOutcome.CRASHED
    assert outcome.message.startswith("RuntimeError: raised ")


@pytest.mark.parametrize("method", ["create", "calc_reward"])
async def test_failures_are_data_what_exits_when_it_is_read_fails_the_request_alone(method: str):
    class Exits(BaseTool):
        async def create(self, instance_id: str | None = None, **_: Any) -> Any:
            return (ExitsWhenRead(), "") if method == "create" else instance_id

        async def calc_reward(self, instance_id: str, **_: Any) -> Any:
            return ExitsWhenRead()

    session = session_of(Exits({}, schema("exits")))

    async def live() -> None:
        await session.create()
        await session.calc_rewards()

    with pytest.raises(ToolLifeError, match=f"{method}: RuntimeError: raised "):
        await live()
    assert await session.release() == []


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
async def test_failures_are_data_an_unprintable_error_is_reported_as_such(method: str):
    class Untold(FlakyTool):
        async def _enter(self, entered: str, kwargs: dict[str, Any]) -> None:
            if entered == method:
                raise UnprintableError

    session = session_of(Untold())
    messages: list[str] = []
    try:
        await session.create()
        [outcome] = await session.execute([call("flaky")])
        messages.append(outcome.message)
        await session.calc_rewards()
    except ToolLifeError as error:
        messages.append(str(error))
    messages += map(str, await session.release())
    assert [text for text in messages if f"UnprintableError: {UNPRINTABLE_MESSAGE}" in text]


async def test_failures_are_data_an_unprintable_tool_error_is_still_an_answer():
    class MissingError(ToolError):
        def __init__(self, table: str) -> None:
            self.table = table  # and the base class is told nothing

    class Looks(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            raise MissingError("stars")

    outcome = await executed(Looks({}, schema("looks")))
    assert outcome.outcome is CallOutcome.TOOL_ERROR
    assert outcome.response.text == "(its message raises AttributeError)"


async def test_none_names_the_tool_on_the_record():
    message = (await executed(AnyTool(None))).message
    assert "tool 'any' (AnyTool in test_session.py) returned None" in message


async def test_tool_error_is_shown_to_the_model_and_no_infrastructure_failure():
    outcome = await executed(FlakyTool(execute="tool_error"))
    assert outcome.outcome is CallOutcome.TOOL_ERROR
    assert outcome.response.text == "try a smaller number"
    assert not outcome.is_infrastructure_failure


@pytest.mark.parametrize("behaviour", ["raise", "exit", "cancel_self"])
async def test_other_exceptions_are_not_shown_to_the_model(behaviour: str):
    outcome = await executed(FlakyTool(execute=behaviour))
    assert outcome.outcome is CallOutcome.CRASHED
    assert "secret" not in outcome.response.text
    assert behaviour != "raise" or "secret detail" in outcome.message


@pytest.mark.parametrize("behaviour", ["hang", "ignore_cancel"])
async def test_a_tool_that_hangs_is_abandoned_within_a_tenth_of_its_time(behaviour: str):
    outcome = await executed(FlakyTool(execute=behaviour), timeout_s=0.2)
    assert outcome.outcome is CallOutcome.TIMEOUT
    assert outcome.response.text == "Error: tool 'flaky' timed out after 0.2 seconds"
    # 5 % grace, the rest for a busy machine.
    assert 0.2 <= outcome.seconds < 0.3


async def test_a_tool_may_have_its_own_timeout():
    tool = FlakyTool(execute="hang")
    tool.config["timeout_s"] = 0.05
    outcome = await executed(tool, timeout_s=60)
    assert outcome.response.text == "Error: tool 'flaky' timed out after 0.05 seconds"


async def test_a_hanging_tool_does_not_hold_up_the_others():
    slow, quick = FlakyTool("slow", execute="hang"), FlakyTool("quick")
    session = session_of(slow, quick, timeout_s=0.1)
    await session.create()
    outcomes = await session.execute([call("slow", 0), call("quick", 1)])
    assert [o.outcome for o in outcomes] == [CallOutcome.TIMEOUT, CallOutcome.OK]
    assert outcomes[1].seconds < 0.1


async def test_should_stop_reward_and_metrics_reach_the_outcome():
    tool = AnyTool(ToolResult(ToolResponse(text="done"), 0.25, {"rows": 3}, should_stop=True))
    outcome = await executed(tool)
    assert (outcome.reward, outcome.metrics, outcome.should_stop) == (0.25, {"rows": 3}, True)


class ParallelTool(BaseTool):
    """Counts how many of its calls run at once, and answers in an order of its own."""

    def __init__(self) -> None:
        super().__init__({}, schema("parallel"))
        self.running = self.most = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(parameters["seconds"])
        self.running -= 1
        return str(parameters["number"])


@given(
    delays=st.lists(st.sampled_from([0.0, 0.001, 0.003]), max_size=12),
    limit=st.integers(min_value=1, max_value=5),
)
@settings(max_examples=20, deadline=None)
def test_all_calls_run_at_most_so_many_at_once_and_answer_in_order(delays: list[float], limit: int):
    async def run() -> tuple[ParallelTool, list[str | None]]:
        tool = ParallelTool()
        session = session_of(tool, max_parallel_calls=limit)
        calls = [call("parallel", i, number=i, seconds=s) for i, s in enumerate(delays)]
        return tool, [outcome.response.text for outcome in await session.execute(calls)]

    tool, texts = asyncio.run(run())
    assert texts == [str(i) for i in range(len(delays))]
    assert tool.most == min(limit, len(delays))


async def test_time_in_the_queue_does_not_count():
    session = session_of(ParallelTool(), timeout_s=0.15, max_parallel_calls=1)
    calls = [call("parallel", i, number=i, seconds=0.06) for i in range(4)]
    assert all(o.outcome is CallOutcome.OK for o in await session.execute(calls))


async def test_kwargs_reach_the_method_they_are_named_after():
    tool = FlakyTool()
    kwargs = {
        "create_kwargs": {"a": 1},
        "execute_kwargs": {"b": 2},
        "calc_reward_kwargs": {"c": 3},
        "release_kwargs": {"d": 4},
    }
    session = session_of(tool, tools_kwargs={"flaky": kwargs})
    await session.create()
    await session.execute([call("flaky")])
    assert await session.calc_rewards() == {"flaky": 0.5}
    assert await session.release() == []
    assert tool.seen == [
        ("create", {"a": 1}),
        ("execute", {"b": 2}),
        ("calc_reward", {"c": 3}),
        ("release", {"d": 4}),
    ]


async def test_nulls_that_parquet_fills_in_say_nothing():
    tool = FlakyTool()
    kwargs = {"flaky": {"create_kwargs": None, "execute_kwargs": {"b": 2}}, "other": None}
    session = session_of(tool, tools_kwargs=kwargs)
    await session.create()
    await session.release()
    assert tool.seen[0] == ("create", {})


def test_a_misspelt_kwargs_key_names_the_nearest():
    with pytest.raises(DataError) as error:
        session_of(FlakyTool(), tools_kwargs={"flaky": {"creat_kwargs": {}}})
    assert "did you mean 'create_kwargs'" in str(error.value)
    assert error.value.details["key"] == "extra_info.tools_kwargs.flaky.creat_kwargs"


async def test_what_a_tool_is_given_it_may_change():
    class Greedy(FlakyTool):
        async def create(self, instance_id: str | None = None, rows: Any = None) -> Any:
            rows.clear()
            return instance_id

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            parameters.clear()
            return "ok"

    row = {"flaky": {"create_kwargs": {"rows": [1, 2]}}}
    session = session_of(Greedy(), tools_kwargs=row)
    asked = call("flaky", x=[1])
    await session.create()
    await session.execute([asked])
    await session.release()
    assert row == {"flaky": {"create_kwargs": {"rows": [1, 2]}}}
    assert asked.function.arguments == {"x": [1]}


async def test_what_creation_says_is_handed_back_unless_empty():
    session = session_of(FlakyTool("a"), FlakyTool("b", opening="Welcome"))
    assert [(o.tool, o.response.text) for o in await session.create()] == [("b", "Welcome")]


async def test_a_tool_that_gives_another_instance_id_gets_it_back():
    class Renaming(FlakyTool):
        async def create(self, instance_id: str | None = None, **_: Any) -> Any:
            return "mine", ToolResponse()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            return instance_id

    assert (await executed(Renaming())).response.text == "mine"


async def test_unknown_kwargs_are_the_users_error_and_isolated():
    class Strict(FlakyTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
            return "ok"

    session = session_of(Strict(), tools_kwargs={"flaky": {"execute_kwargs": {"x": 1}}})
    await session.create()
    [outcome] = await session.execute([call("flaky")])
    await session.release()
    assert outcome.outcome is CallOutcome.CRASHED
    assert "unexpected keyword argument 'x'" in outcome.message


@pytest.mark.parametrize("method", ["create", "calc_reward"])
async def test_a_broken_life_names_tool_and_method(method: str):
    tool = FlakyTool(**{method: "raise"})
    session = session_of(tool)

    async def live() -> None:
        await session.create()
        await session.calc_rewards()

    with pytest.raises(ToolLifeError, match=f"tool 'flaky', {method}: ValueError"):
        await live()
    assert await session.release() == []
    assert tool.counts["release"] == 1


async def test_a_method_that_a_tool_leaves_as_it_is_costs_no_task():
    class Stateless(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            return instance_id

    session = session_of(Stateless({}, schema("stateless")))
    tasks: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_task_factory(
        lambda loop, work, **kwargs: (tasks.append(str(kwargs)), asyncio.Task(work, **kwargs))[1]
    )
    assert await session.create() == []
    assert await session.calc_rewards() == {"stateless": 0.0}
    assert await session.release() == []
    assert not tasks
    [outcome] = await session.execute([call("stateless")])
    assert outcome.response.text == "r"
    assert len(tasks) == 1


async def test_a_method_that_is_replaced_on_the_object_is_the_tools_own():
    released: list[str] = []

    async def release(instance_id: str, **_: Any) -> None:
        released.append(instance_id)

    tool = AnyTool("x")
    tool.release = release  # type: ignore[method-assign]
    session = session_of(tool)
    await session.create()
    assert await session.release() == []
    assert released == ["r"]


async def test_a_release_that_fails_disturbs_no_other():
    tools = [FlakyTool("a", release="raise"), FlakyTool("b", release="hang"), FlakyTool("c")]
    session = session_of(*tools, timeout_s=0.05)
    await session.create()
    failures = await session.release()
    assert [failure.details["tool"] for failure in failures] == ["a", "b"]
    assert tools[2].counts["release"] == 1


async def test_releases_end_though_the_caller_is_cancelled():
    class Slow(FlakyTool):
        async def release(self, instance_id: str, **kwargs: Any) -> None:
            await asyncio.sleep(0.02)
            self.counts["released"] += 1

    tool = Slow()
    session = session_of(tool)
    await session.create()
    releasing = asyncio.create_task(session.release())
    await asyncio.sleep(0.005)
    releasing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await releasing
    assert await session.release() == []
    assert tool.counts["released"] == 1


methods = st.fixed_dictionaries(
    {name: st.sampled_from(BEHAVIOURS) for name in ("create", "execute", "calc_reward", "release")}
)


@given(
    behaviours=st.lists(methods, min_size=1, max_size=3),
    num_calls=st.integers(0, 3),
    cancel_after=st.one_of(st.none(), st.integers(0, 8)),
)
@settings(max_examples=30, deadline=None)
def test_life_cycle_what_was_created_is_released_once_whatever_happens(
    behaviours: list[dict[str, str]], num_calls: int, cancel_after: int | None
):
    tools = [FlakyTool(f"t{i}", **b) for i, b in enumerate(behaviours)]
    healthy = FlakyTool("healthy")

    async def request() -> None:
        session = session_of(*tools, healthy, timeout_s=0.02)
        try:
            await session.create()
            for _ in range(num_calls):
                await session.execute([call(t.name) for t in (*tools, healthy)])
            await session.calc_rewards()
        finally:
            await session.release()

    async def main() -> None:
        task = asyncio.create_task(request())
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() or isinstance(task.exception(), ToolLifeError | None)

    started = time.monotonic()
    asyncio.run(main())
    for tool in (*tools, healthy):
        assert tool.counts["create"] == tool.counts["release"] <= 1
        assert tool.counts["calc_reward"] <= 1
    if cancel_after is None and all(b["create"] in ("fine", "none") for b in behaviours):
        assert healthy.counts["execute"] == num_calls
        assert healthy.counts["calc_reward"] == 1
    assert time.monotonic() - started < 5
