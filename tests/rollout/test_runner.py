"""One whole conversation for each way in which a request can end."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentrl.engines.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.errors import EngineError, Fault, TemplateError
from agentrl.interactions import InteractionResult
from agentrl.messages import ToolResponse
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState, StopReason
from agentrl.rollout.templates import ChatTemplate
from agentrl.tools import ToolResult
from tests.fakes.plugins import (
    FakeTool,
    FakeUser,
    assert_invariants,
    calling,
    check_life,
    decode,
    encode,
    make_context,
    make_engine,
    make_request,
    tiny_tokenizer,
)
from tests.fakes.waiting import until

ASKED = {"name": "fake"}
END = "<|im_end|>"
CALL = calling("lookup", q="Bern")


async def roll_out(
    engine: ScriptedEngine, context: RolloutContext | None = None, **fields: Any
) -> AsyncRolloutRequest:
    request = await run_request(make_request(**fields), context or make_context(engine))
    assert_invariants(request, engine)
    return request


def response(request: AsyncRolloutRequest) -> str:
    return decode(request.response_ids)


def trained(request: AsyncRolloutRequest) -> str:
    pairs = zip(request.response_ids, request.loss_mask, strict=True)
    return decode([id for id, mask in pairs if mask])


def outcomes(request: AsyncRolloutRequest) -> list[str]:
    return [call.outcome for turn in request.turns for call in turn.calls]


def shown(role: str, text: str) -> str:
    return f"\n<|im_start|>{role}\n{text}{END}\n<|im_start|>assistant\n"


# ANSWERED


async def test_single_turn_data_takes_the_same_path():
    engine = make_engine("It is 5.")
    request = await roll_out(engine)
    assert request.stop_reason is StopReason.ANSWERED
    assert decode(request.prompt_ids) == (f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n")
    assert response(request) == trained(request) == f"It is 5.{END}"
    assert [message.role for message in request.messages] == ["user", "assistant"]
    assert request.messages[-1].content == "It is 5."
    assert request.differences == []
    assert request.metrics["release_failures"] == 0
    assert (request.num_turns, len(request.turns)) == (2, 1)


async def test_without_tools_nothing_is_a_call():
    request = await roll_out(make_engine(CALL))
    assert request.stop_reason is StopReason.ANSWERED
    assert request.messages[-1].content == CALL
    assert outcomes(request) == []


async def test_a_tool_is_called_and_the_answer_follows_its_result():
    tool = FakeTool(reply=lambda arguments: ToolResult(ToolResponse(text="wet"), 0.5, {"mm": 3}))
    engine = make_engine(f"Let me see.{CALL}", "It rains.")
    request = await roll_out(engine, make_context(engine, tools=[tool]))
    assert request.stop_reason is StopReason.ANSWERED
    first, second = f"Let me see.{CALL}{END}", f"It rains.{END}"
    assert response(request) == first + shown("tool", "wet") + second
    assert trained(request) == first + second
    assert [turn.role for turn in request.turns] == ["assistant", "tool", "assistant"]
    assert [turn.reward for turn in request.turns] == [0.5, None, None]
    [call] = request.turns[0].calls
    assert (call.name, call.arguments, call.outcome) == ("lookup", {"q": "Bern"}, "ok")
    assert (call.reward, call.metrics, call.num_tokens) == (0.5, {"mm": 3}, 3)
    assert [m.role for m in request.messages] == ["user", "assistant", "tool", "assistant"]
    assert request.messages[1].content == "Let me see."
    assert request.messages[1].tool_calls is not None
    assert request.messages[2].name == "lookup"
    assert request.messages[2].tool_call_id == request.messages[1].tool_calls[0].id
    assert request.differences == []
    assert [len(c) for c in engine.calls] == [
        request.num_prompt_tokens,
        request.num_prompt_tokens + request.turns[1].end,
    ]


async def test_an_end_of_turn_that_was_not_sampled_is_appended_as_observed():
    tool = FakeTool()
    engine = make_engine([*encode(CALL), *encode("<|endoftext|>")], "Done.")
    request = await roll_out(engine, make_context(engine, tools=[tool]))
    first = f"{CALL}<|endoftext|>"
    assert response(request) == f"{first}{END}{shown('tool', 'found Bern')}Done.{END}"
    assert trained(request) == f"{first}Done.{END}"


async def test_a_turn_cut_by_its_own_budget_is_a_turn_that_ended():
    engine = make_engine("It is a long story", "Short.")
    context = make_context(engine, interactions=[FakeUser("Shorter!")])
    request = await roll_out(
        engine, context, interaction_kwargs=ASKED, budgets=Budgets(max_turn_tokens=8)
    )
    assert response(request) == f"It is a {END}{shown('user', 'Shorter!')}Short.{END}"
    assert trained(request) == f"It is a Short.{END}"
    assert [turn.cut for turn in request.turns] == ["turn", None, None]
    assert request.stop_reason is StopReason.INTERACTION_ENDED


async def test_several_tools_answer_in_parallel_in_the_order_of_the_calls():
    running = 0
    most = 0

    class Slow(FakeTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01 * parameters["n"])
            running -= 1
            return f"{self.name} {parameters['n']}"

    number = {"n": {"type": "integer"}}
    tools = [Slow("a", properties=number), Slow("b", properties=number)]
    wanted = [("a", 4), ("b", 1), ("a", 3), ("b", 0), ("a", 2)]
    engine = make_engine("".join(calling(name, n=n) for name, n in wanted), "Done.")
    context = make_context(engine, tools=tools, max_parallel_calls=3)
    request = await roll_out(engine, context)
    texts = [m.content for m in request.messages if m.role == "tool"]
    assert texts == [f"{name} {n}" for name, n in wanted]
    assert most == 3
    assert request.num_turns == 4
    assert [call.num_tokens for call in request.turns[0].calls] == [3] * 5


@pytest.mark.parametrize(
    ("interval", "tool_first", "heard"),
    [(1, False, True), (2, False, False), (2, True, True), (3, True, False)],
)
async def test_an_answer_that_the_interval_skips_ends_the_request(
    interval: int, tool_first: bool, heard: bool
):
    user = FakeUser()
    engine = make_engine(*([CALL] if tool_first else []), "Bern.")
    context = make_context(
        engine, tools=[FakeTool()], interactions=[user], interaction_interval=interval
    )
    request = await roll_out(engine, context, interaction_kwargs=ASKED)
    ends = {True: StopReason.INTERACTION_ENDED, False: StopReason.ANSWERED}
    assert request.stop_reason is ends[heard]
    check_life(user.lives, "start", "finalize")
    assert len(user.heard) == heard


async def test_the_chance_of_an_interaction_is_drawn_from_the_requests_seed():
    async def is_heard(seed: int, chance: float) -> bool:
        engine = make_engine("Bern.")
        context = make_context(engine, interactions=[FakeUser()], interaction_prob=chance)
        request = await roll_out(engine, context, interaction_kwargs=ASKED, seed=seed)
        return request.stop_reason is StopReason.INTERACTION_ENDED

    drawn = [await is_heard(seed, 0.5) for seed in range(40)]
    assert 10 < sum(drawn) < 30
    assert drawn == [await is_heard(seed, 0.5) for seed in range(40)]
    assert not any([await is_heard(seed, 0.0) for seed in range(5)])
    assert all([await is_heard(seed, 1.0) for seed in range(5)])


async def test_a_row_that_asks_for_no_interaction_has_none():
    user = FakeUser()
    engine = make_engine("Bern.")
    request = await roll_out(engine, make_context(engine, interactions=[user]))
    assert request.stop_reason is StopReason.ANSWERED
    assert not user.lives


# TOOL_ENDED


async def test_a_tool_may_end_its_request():
    tool = FakeTool(reply=lambda _: ToolResult(ToolResponse(text="won"), 1.0, should_stop=True))
    engine = make_engine(CALL, "never said")
    request = await roll_out(engine, make_context(engine, tools=[tool]))
    assert request.stop_reason is StopReason.TOOL_ENDED
    assert request.state is RequestState.COMPLETED
    assert response(request) == f"{CALL}{END}{shown('tool', 'won')}"
    assert trained(request) == f"{CALL}{END}"
    assert request.turns[0].reward == 1.0
    assert request.messages[-1].content == "won"
    assert len(engine.calls) == 1


# INTERACTION_ENDED


async def test_an_interaction_replies_judges_and_ends():
    last = InteractionResult(True, "well done", 1.0, {"hints": 1})
    user = FakeUser("Are you sure?", last)
    engine = make_engine("Bern.", "Yes.")
    context = make_context(engine, interactions=[user])
    request = await roll_out(engine, context, interaction_kwargs=ASKED)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert response(request) == f"Bern.{END}{shown('user', 'Are you sure?')}Yes.{END}"
    assert trained(request) == f"Bern.{END}Yes.{END}"
    assert [turn.reward for turn in request.turns] == [0.25, None, 1.0]
    assert request.turns[2].metadata == {"hints": 1}
    assert [m["role"] for m in user.heard[1]] == ["user", "assistant", "user", "assistant"]
    assert request.messages[-1].content == "Yes."
    assert request.differences == []


# MALFORMED_CALL, and the other policies


@pytest.mark.parametrize("bad", ["<tool_call>{oops</tool_call>", calling("lookup"), calling("x")])
async def test_a_malformed_call_stops_the_request_where_the_policy_says_so(bad: str):
    tool = FakeTool()
    engine = make_engine(bad + CALL)
    context = make_context(engine, tools=[tool], on_malformed_call="stop")
    request = await roll_out(engine, context)
    assert request.stop_reason is StopReason.MALFORMED_CALL
    assert request.end is not None
    assert request.end.fault is Fault.MODEL
    assert outcomes(request) == ["malformed", "skipped"]
    assert request.in_baseline
    assert trained(request) == response(request) == f"{bad}{CALL}{END}"
    assert "execute" not in next(iter(tool.lives.values()))


@pytest.mark.parametrize(
    ("bad", "stop"),
    [
        ("<tool_call>{oops</tool_call>", StopReason.MALFORMED_CALL),
        (calling("lookup"), StopReason.ANSWERED),
        (calling("x"), StopReason.ANSWERED),
    ],
)
async def test_a_call_that_can_be_read_need_not_stop_the_request(bad: str, stop: StopReason):
    engine = make_engine(bad, "Bern.")
    context = make_context(engine, tools=[FakeTool()], on_malformed_call="stop_unreadable")
    request = await roll_out(engine, context)
    assert request.stop_reason is stop


@pytest.mark.parametrize("bad", ["<tool_call>{oops</tool_call>", calling("lookup"), calling("x")])
@pytest.mark.parametrize("policy", ["observe", "mask"])
async def test_a_malformed_call_is_answered_by_its_error(bad: str, policy: str):
    engine = make_engine(f"{bad}{CALL}", "Bern.")
    context = make_context(engine, tools=[FakeTool()], on_malformed_call=policy)
    request = await roll_out(engine, context)
    assert request.stop_reason is StopReason.ANSWERED
    assert outcomes(request) == ["malformed", "ok"]
    assert "was not executed" in request.messages[2].text
    assert request.messages[3].text == "found Bern"
    first = "" if policy == "mask" else f"{bad}{CALL}{END}"
    assert trained(request) == f"{first}Bern.{END}"
    assert response(request).startswith(f"{bad}{CALL}{END}\n<|im_start|>tool\nError: ")
    assert (request.turns[0].excluded is not None) == (policy == "mask")


class RefusingTemplate:
    """A template that cannot carry what comes behind a turn."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def plan_delta(self, *_: Any, **__: Any) -> Any:
        raise TemplateError("results of two tools", template="t", role="tool")


async def test_the_policy_is_not_blamed_for_calls_that_the_template_cannot_answer():
    tool = FakeTool()
    engine = make_engine(CALL)
    context = make_context(engine, tools=[tool])
    refusing: Any = RefusingTemplate(context.template)
    request = await roll_out(engine, replace(context, template=refusing))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.LIMIT
    assert "results of two tools" in request.error.message
    assert outcomes(request) == ["skipped"]
    assert request.turns[0].calls[0].message == "not executed: results of two tools"
    assert "execute" not in next(iter(tool.lives.values()))
    assert not request.in_baseline


NAMES_CALLS = (
    "{% set ns = namespace(name=none) %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.name or ns.name }}: {% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes the name of the tool with its result, and takes it from the call if it is missing."""


async def test_a_call_without_a_readable_name_is_answered_if_the_template_writes_names():
    template = ChatTemplate(tiny_tokenizer(), custom_template=NAMES_CALLS)
    engine = make_engine("<tool_call>{oops</tool_call>", CALL, "Bern.")
    context = make_context(engine, tools=[FakeTool()], template=template)
    request = await roll_out(engine, context)
    assert request.stop_reason is StopReason.ANSWERED
    assert outcomes(request) == ["malformed", "ok"]
    assert "<|im_start|>tool\nunknown: Error: " in response(request)
    assert "<|im_start|>tool\nlookup: found Bern" in response(request)


@pytest.mark.parametrize("depth", [60, 80, 300, 900])
async def test_arguments_nested_without_end_are_malformed(depth: int):
    deep = "[" * depth + "]" * depth
    engine = make_engine(
        f'<tool_call>{{"name": "lookup", "arguments": {{"q": {deep}}}}}</tool_call>', "Bern."
    )
    tool = FakeTool(properties={"q": {}}, reply=lambda _: "ok")
    request = await roll_out(engine, make_context(engine, tools=[tool]))
    assert outcomes(request) == ["ok" if depth == 60 else "malformed"]
    assert request.stop_reason is StopReason.ANSWERED
    request.model_dump_json()


# Limits of turns and calls


async def test_a_call_in_the_last_turn_is_not_executed():
    tool = FakeTool()
    engine = make_engine(CALL)
    request = await roll_out(
        engine, make_context(engine, tools=[tool]), budgets=Budgets(max_assistant_turns=2)
    )
    assert request.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert outcomes(request) == ["ok", "skipped"]
    assert [turn.role for turn in request.turns] == ["assistant", "tool", "assistant"]
    assert next(iter(tool.lives.values())).count("execute") == 1


async def test_an_answer_in_the_last_turn_is_still_judged():
    user = FakeUser("Go on.")
    engine = make_engine("Bern.")
    request = await roll_out(
        engine,
        make_context(engine, interactions=[user]),
        interaction_kwargs=ASKED,
        budgets=Budgets(max_assistant_turns=1),
    )
    assert request.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert [turn.reward for turn in request.turns] == [0.25]
    assert len(request.messages) == 2


async def test_the_interaction_judges_the_answer_after_its_last_reply():
    user = FakeUser("One.", "Two.", "Three.")
    engine = make_engine("Bern.")
    request = await roll_out(
        engine,
        make_context(engine, interactions=[user]),
        interaction_kwargs=ASKED,
        budgets=Budgets(max_user_turns=2),
    )
    assert request.stop_reason is StopReason.MAX_USER_TURNS
    assert [turn.role for turn in request.turns] == ["assistant", "user"] * 2 + ["assistant"]
    assert [turn.reward for turn in request.turns] == [0.25, None, 0.25, None, 0.25]
    assert request.messages[-1].role == "assistant"
    assert "Three" not in response(request)


async def test_more_calls_than_allowed_end_the_request_unexecuted():
    engine = make_engine(CALL, CALL + CALL)
    context = make_context(engine, tools=[FakeTool()])
    request = await roll_out(engine, context, budgets=Budgets(max_tool_calls=2))
    assert request.stop_reason is StopReason.MAX_TOOL_CALLS
    assert outcomes(request) == ["ok", "skipped", "skipped"]


# RESPONSE_BUDGET, MODEL_LENGTH


async def test_the_response_budget_cuts_a_turn():
    tool = FakeTool()
    engine = make_engine(f"{CALL} and more")
    context = make_context(engine, tools=[tool])
    request = await roll_out(
        engine, context, budgets=Budgets(max_response_tokens=len(encode(CALL)))
    )
    assert request.stop_reason is StopReason.RESPONSE_BUDGET
    assert request.turns[0].cut == "response"
    assert trained(request) == response(request) == CALL
    assert outcomes(request) == ["skipped"]


async def test_an_observation_that_leaves_no_tokens_for_an_answer_is_left_out():
    first = len(encode(CALL + END))
    delta = len(encode(shown("tool", "found Bern")))
    for budget, reason in [
        (first + delta, StopReason.RESPONSE_BUDGET),
        (first + delta + 1, StopReason.RESPONSE_BUDGET),
    ]:
        engine = make_engine(CALL, "B")
        context = make_context(engine, tools=[FakeTool()])
        request = await roll_out(engine, context, budgets=Budgets(max_response_tokens=budget))
        assert request.stop_reason is reason
        fits = budget > first + delta
        assert len(request.turns) == (3 if fits else 1)
        assert request.turns[-1].cut == ("response" if fits else None)
        assert request.turns[0].calls[0].outcome == "ok"
        assert request.messages[-1].role == "assistant"


async def test_the_models_length_cuts_a_turn():
    engine = make_engine("A long story")
    prompt = len(encode(f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"))
    request = await roll_out(engine, budgets=Budgets(max_model_len=prompt + 6))
    assert request.stop_reason is StopReason.MODEL_LENGTH
    assert response(request) == "A long"
    assert request.turns[0].cut == "model"


async def test_a_prompt_that_leaves_no_tokens_is_no_fault_of_the_model():
    engine = make_engine("Bern.")
    request = await roll_out(engine, budgets=Budgets(max_model_len=12))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.LIMIT
    assert "leaves no room" in request.error.message
    assert engine.calls == []


# WALL_CLOCK, ABORTED


@pytest.mark.parametrize("place", ["engine", "tool", "user", "create", "start"])
async def test_the_wall_clock_ends_a_request_anywhere(place: str):
    tool = FakeTool(
        execute="hang" if place == "tool" else "fine",
        create="hang" if place == "create" else "fine",
    )
    user = FakeUser(
        respond="hang" if place == "user" else "fine",
        start="hang" if place == "start" else "fine",
    )
    slow = ScriptedAnswer("late", delay_s=60)
    engine = make_engine(CALL, slow if place == "engine" else "Bern.")
    context = make_context(engine, tools=[tool], interactions=[user], tool_timeout_s=1.0)
    request = await roll_out(
        engine, context, interaction_kwargs=ASKED, budgets=Budgets(timeout_s=0.05)
    )
    assert request.stop_reason is StopReason.WALL_CLOCK
    assert request.error is not None
    assert request.error.fault is Fault.LIMIT
    assert not request.is_trained
    check_life(tool.lives, "create", "release")
    check_life(user.lives, "start", "finalize")
    assert all("calc_reward" not in life for life in tool.lives.values())


async def test_an_aborted_call_keeps_what_was_sampled():
    engine = make_engine(CALL, ScriptedAnswer("late", delay_s=60))
    tool = FakeTool()
    request = make_request()
    task = asyncio.create_task(run_request(request, make_context(engine, tools=[tool])))
    await until(lambda: len(engine.calls) == 2)
    await engine.abort(request.request_id)
    assert await task is request
    assert_invariants(request, engine)
    assert request.stop_reason is StopReason.ABORTED
    assert request.error is not None
    assert request.error.fault is Fault.LIMIT
    assert trained(request) == f"{CALL}{END}"
    check_life(tool.lives, "create", "release")


def seen(plugin: FakeTool | FakeUser) -> list[str]:
    """The methods that were called, of all instances."""
    return [method for life in plugin.lives.values() for method in life]


@pytest.mark.parametrize("place", ["engine", "tool", "user", "create", "start", "calc_reward"])
async def test_cancelling_releases_everything_and_goes_on(place: str):
    tool = FakeTool(**{place if place != "tool" else "execute": "hang"})
    user = FakeUser(
        respond="hang" if place == "user" else "fine",
        start="hang" if place == "start" else "fine",
    )
    slow = ScriptedAnswer("late", delay_s=60)
    engine = make_engine(CALL, slow if place == "engine" else "Bern.")
    context = make_context(engine, tools=[tool], interactions=[user], tool_timeout_s=2.0)
    request = make_request(interaction_kwargs=ASKED)
    task = asyncio.create_task(run_request(request, context))
    begun = {"engine": lambda: len(engine.calls) == 2, "tool": lambda: "execute" in seen(tool),
             "user": lambda: "respond" in seen(user)}  # fmt: skip
    await until(begun.get(place, lambda: place in seen(tool) + seen(user)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.stop_reason is StopReason.ABORTED
    assert_invariants(request, engine)
    check_life(tool.lives, "create", "release")
    check_life(user.lives, "start", "finalize")


async def test_cancelling_twice_still_waits_for_the_release():
    releasing, released = asyncio.Event(), asyncio.Event()

    class Slow(FakeTool):
        async def release(self, instance_id: str, **kwargs: Any) -> None:
            releasing.set()
            await asyncio.sleep(0.05)
            released.set()

    engine = make_engine("Bern.")
    request = make_request()
    task = asyncio.create_task(run_request(request, make_context(engine, tools=[Slow()])))
    await releasing.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.001)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert released.is_set()
    assert request.stop_reason is StopReason.ANSWERED


# FAILED


@pytest.mark.parametrize("error", [EngineError("gone"), RuntimeError("gone"), TimeoutError("gone")])
async def test_a_failure_of_the_engine_is_the_engines(error: Exception):
    tool = FakeTool()
    engine = make_engine(CALL, error)
    request = await roll_out(engine, make_context(engine, tools=[tool]))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.ENGINE
    assert (request.error.kind, request.error.turn) == (type(error).__name__, 2)
    assert "gone" in request.error.message
    assert "Traceback" in request.error.traceback
    assert trained(request) == f"{CALL}{END}"
    check_life(tool.lives, "create", "release")


async def test_a_stray_cancellation_of_the_engine_is_a_failure_and_no_cancellation():
    engine = make_engine(asyncio.CancelledError())
    request = await roll_out(engine)
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.ENGINE


@pytest.mark.parametrize(
    "answer",
    [
        ScriptedAnswer([1, 2], log_probs=[-1.0, float("nan")]),
        ScriptedAnswer([1, 2], log_probs=[-1.0, 0.5]),
        ScriptedAnswer([1, -2]),
    ],
)
async def test_what_is_no_sample_never_enters_the_ledger(answer: ScriptedAnswer):
    engine = make_engine(answer)
    request = await run_request(make_request(), make_context(engine))
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.ENGINE, "LedgerError")
    assert request.response_ids == []


@pytest.mark.parametrize("method", ["start", "respond"])
@pytest.mark.parametrize("behaviour", ["raise", "exit", "cancel_self", "hang"])
async def test_a_failure_of_the_interaction_is_the_interactions(method: str, behaviour: str):
    tool = FakeTool()
    user = FakeUser(**{method: behaviour})
    engine = make_engine("Bern.")
    context = make_context(engine, tools=[tool], interactions=[user], interaction_timeout_s=0.05)
    request = await roll_out(engine, context, interaction_kwargs=ASKED)
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.INTERACTION
    check_life(tool.lives, "create", "release")
    check_life(user.lives, "start", "finalize")


async def test_an_unknown_interaction_is_the_rows_fault():
    engine = make_engine("Bern.")
    context = make_context(engine, interactions=[FakeUser()])
    request = await roll_out(engine, context, interaction_kwargs={"name": "fak"})
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.LIMIT, "DataError")
    assert "one of fake" in request.error.message


@pytest.mark.parametrize("method", ["create", "calc_reward"])
@pytest.mark.parametrize("behaviour", ["raise", "exit", "cancel_self", "hang"])
async def test_a_tool_that_breaks_in_its_own_life_fails_its_request(method: str, behaviour: str):
    tool, other = FakeTool("broken", **{method: behaviour}), FakeTool()
    engine = make_engine("Bern.")
    context = make_context(engine, tools=[tool, other], tool_timeout_s=0.05)
    request = await roll_out(engine, context)
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.TOOL, "ToolLifeError")
    assert not request.is_trained
    assert request.tool_rewards == {}
    check_life(tool.lives, "create", "release")
    check_life(other.lives, "create", "release")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much"])
async def test_a_tools_reward_must_be_a_finite_number(value: Any):
    engine = make_engine("Bern.")
    request = await roll_out(engine, make_context(engine, tools=[FakeTool(value=value)]))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault is Fault.TOOL


@pytest.mark.parametrize("behaviour", ["raise", "exit", "cancel_self", "hang"])
async def test_a_release_that_breaks_is_counted_and_nothing_more(behaviour: str):
    tool = FakeTool(value=0.5, release=behaviour)
    user = FakeUser(finalize=behaviour)
    engine = make_engine("Bern.")
    context = make_context(
        engine, tools=[tool], interactions=[user], tool_timeout_s=0.05, interaction_timeout_s=0.05
    )
    request = await roll_out(engine, context, interaction_kwargs=ASKED)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.metrics["release_failures"] == 2
    assert request.tool_rewards == {"lookup": 0.5}


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [("raise", "crashed"), ("tool_error", "tool_error"), ("hang", "timeout"), ("exit", "crashed")],
)
async def test_a_call_that_fails_is_an_observation(behaviour: str, outcome: str):
    engine = make_engine(CALL, "Never mind.")
    tool = FakeTool(execute=behaviour)
    request = await roll_out(engine, make_context(engine, tools=[tool], tool_timeout_s=0.05))
    assert request.stop_reason is StopReason.ANSWERED
    assert outcomes(request) == [outcome]
    assert "secret" not in response(request)


@pytest.mark.parametrize(
    ("behaviour", "outcome"), [("raise", "crashed"), ("hang", "timeout"), ("exit", "crashed")]
)
async def test_a_tool_that_fails_ends_its_request_where_the_policy_says_so(
    behaviour: str, outcome: str
):
    engine = make_engine(CALL, "Never mind.")
    tool = FakeTool(execute=behaviour)
    context = make_context(engine, tools=[tool], tool_timeout_s=0.05, on_tool_failure="fail")
    request = await roll_out(engine, context)
    assert (request.state, request.stop_reason) == (RequestState.FAILED, StopReason.FAILED)
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.TOOL, "ToolCallError")
    assert f"tool 'lookup', {outcome}" in request.error.message
    assert not request.in_baseline
    assert not request.is_trained
    assert outcomes(request) == [outcome]
    assert request.turns[0].calls[0].message
    assert response(request) == f"{CALL}{END}"
    check_life(tool.lives, "create", "release")


async def test_what_a_tool_says_itself_is_no_failure_of_the_tool():
    engine = make_engine(CALL, calling("unknown"), "Never mind.")
    context = make_context(engine, tools=[FakeTool(execute="tool_error")], on_tool_failure="fail")
    request = await roll_out(engine, context)
    assert request.stop_reason is StopReason.ANSWERED
    assert outcomes(request) == ["tool_error", "malformed"]


async def test_a_token_check_that_breaks_loses_no_request():
    def broken(_: AsyncRolloutRequest, wording: Any) -> None:
        raise RuntimeError("no idea")

    engine = make_engine("Bern.")
    request = await roll_out(engine, replace(make_context(engine), check_tokens=broken))
    assert request.stop_reason is StopReason.ANSWERED
    assert [d.kind for d in request.differences] == ["check_failed"]


# What a row brings along


async def test_kwargs_reach_the_method_that_they_are_named_after():
    tool = FakeTool()
    methods = ("create", "execute", "calc_reward", "release")
    kwargs = {"lookup": {f"{method}_kwargs": {"to": method} for method in methods}}
    engine = make_engine(CALL, "Bern.")
    await roll_out(engine, make_context(engine, tools=[tool]), tools_kwargs=kwargs)
    assert tool.kwargs == [(method, {"to": method}) for method in methods]


async def test_a_row_selects_its_tools():
    tools = [FakeTool("lookup"), FakeTool("other")]
    engine = make_engine(CALL, "Bern.")
    context = make_context(engine, tools=tools)
    request = await roll_out(engine, context, tool_selection=["other"])
    assert [schema.name for schema in request.tool_schemas] == ["other"]
    assert "lookup" not in decode(request.prompt_ids)
    assert outcomes(request) == ["malformed"]
    assert not tools[0].lives
    none = await roll_out(engine, context, tool_selection=[])
    assert none.stop_reason is StopReason.ANSWERED


async def test_a_row_may_be_shown_the_tools_of_its_tools_kwargs_alone():
    tools = [FakeTool("lookup"), FakeTool("other")]
    engine = make_engine("Bern.")
    context = make_context(engine, tools=tools, tools_per_row="tools_kwargs")
    named = await roll_out(engine, context, tools_kwargs={"other": {}})
    assert [schema.name for schema in named.tool_schemas] == ["other"]
    bare = await roll_out(engine, context)
    assert bare.tool_schemas == []
    assert "lookup" not in decode(bare.prompt_ids)


async def test_a_row_that_names_an_unknown_tool_fails_alone():
    engine = make_engine("Bern.")
    context = make_context(engine, tools=[FakeTool()])
    request = await roll_out(engine, context, tool_selection=["lookdown"])
    assert request.error is not None
    assert (request.error.fault, request.error.kind) == (Fault.LIMIT, "DataError")


async def test_what_a_tool_says_when_it_is_created_opens_the_conversation():
    tool = FakeTool(opening="The door is closed and locked.")
    engine = make_engine("I open it.")
    context = make_context(engine, tools=[tool], max_tool_response_length=16)
    request = await roll_out(engine, context)
    assert [m.role for m in request.messages] == ["user", "tool", "assistant"]
    assert request.messages[1].content == "The do ... cked."
    assert request.num_cut_prompt_tokens > 0
    assert decode(request.prompt_ids).endswith(
        f"tool\n{request.messages[1].text}{END}\n<|im_start|>assistant\n"
    )
    assert request.differences == []


async def test_a_parser_words_openings_and_results_in_its_own_role():
    tool = FakeTool("search", reply=lambda a: "x" * 50, opening="Ask me.", properties={"query": {}})
    engine = make_engine("<search>Bern</search>", "Rain.")
    context = make_context(engine, tools=[tool], parser="search_r1", max_tool_response_length=8)
    request = await roll_out(engine, context)
    roles = [m.role for m in request.messages]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    assert request.messages[1].content == "<information>Ask me.</information>"
    assert request.messages[3].text.startswith("<information>x")
    assert request.messages[3].text.endswith("x</information>")
    assert request.turns[1].role == "tool"


async def test_a_reply_that_is_cut_says_so():
    engine = make_engine("Bern.")
    context = make_context(engine, interactions=[FakeUser("a" * 40)], max_tool_response_length=10)
    request = await roll_out(
        engine,
        context,
        interaction_kwargs=ASKED,
        budgets=Budgets(max_observation_tokens=10),
    )
    reply = request.turns[1]
    assert (reply.cut, reply.num_cut_tokens) == ("observation", 35)
    assert request.messages[2].content == "aaa ... aa"


async def test_half_a_surrogate_pair_from_a_user_is_replaced():
    engine = make_engine("Bern.")
    context = make_context(engine, interactions=[FakeUser("half \ud800")])
    request = await roll_out(engine, context, interaction_kwargs=ASKED)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.messages[2].content == "half ?"
    request.model_dump_json()
