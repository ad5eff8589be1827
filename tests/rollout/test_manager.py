"""Many requests at once: groups, order, room, and what becomes of failures."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config.schema.run import FailureConfig, ValKwargsConfig
from agentrl.engines.protocol import SamplingParams
from agentrl.engines.scripted import Answer, ScriptedAnswer, ScriptedEngine
from agentrl.errors import EngineError, Fault, RolloutError, TransitionError
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import FailureSummary
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.plugins import (
    FakeTool,
    FakeUser,
    assert_invariants,
    calling,
    check_life,
    decode,
    make_context,
    make_engine,
    make_manager,
    make_prompts,
    make_scripted,
    tiny_template,
)
from tests.fakes.waiting import until

CALL = calling("lookup", q="Bern")


def failing(*request_ids: str, error: BaseException | None = None) -> ScriptedEngine:
    """Every request calls the tool and answers; those named break behind the tool."""

    def script(_ids: Sequence[int], _s: SamplingParams, request_id: str, turn: int) -> Answer:
        if turn and request_id in request_ids:
            return error or EngineError("gone")
        return f"I am {request_id}." if turn else CALL

    return make_scripted(script)


def make_tool_context(
    engine: ScriptedEngine, tool: FakeTool | None = None, **settings: Any
) -> RolloutContext:
    return make_context(engine, tools=[tool or FakeTool()], **settings)


async def roll_out(
    manager: RolloutManager, number: int, **fields: Any
) -> list[AsyncRolloutRequest]:
    requests = manager.make_requests(make_prompts(number, **fields), manager.train_plan())
    return await manager.rollout(requests)


def test_prompts_are_expanded_to_adjacent_groups():
    manager = make_manager(make_tool_context(make_engine("x")), n=3, seed=7)
    requests = manager.make_requests(make_prompts(2), manager.train_plan(), step=5)
    assert [r.request_id for r in requests] == [
        f"train-5-{place}-{place}-{offset}" for place in (0, 1) for offset in range(3)
    ]
    assert [r.rollout_offset for r in requests] == [0, 1, 2, 0, 1, 2]
    assert [r.batch_data_id for r in requests] == [0, 0, 0, 1, 1, 1]
    assert len({r.uid for r in requests}) == 2
    assert len({r.seed for r in requests}) == 6
    again = manager.make_requests(make_prompts(2), manager.train_plan(), step=5)
    assert [r.model_dump() for r in again] == [r.model_dump() for r in requests]
    other = manager.make_requests(make_prompts(2), manager.train_plan(), step=6)
    assert not {r.uid for r in other} & {r.uid for r in requests}
    assert not {r.seed for r in other} & {r.seed for r in requests}


def test_samples_of_a_group_share_nothing_that_one_could_change():
    prompts = make_prompts(1, extra_info={"a": 1}, tools_kwargs={"lookup": {"create_kwargs": {}}})
    manager = make_manager(make_tool_context(make_engine("x")), n=2)
    first, second = manager.make_requests(prompts, manager.train_plan())
    first.messages.append(first.messages[0])
    first.messages[0].content = "changed"
    first.extra_info["a"] = 2
    first.tools_kwargs["lookup"]["execute_kwargs"] = {}
    assert second.messages == prompts[0].messages
    assert (second.extra_info, prompts[0].extra_info) == ({"a": 1}, {"a": 1})
    assert second.tools_kwargs == {"lookup": {"create_kwargs": {}}}


async def test_an_interaction_that_changes_its_kwargs_changes_those_of_no_other_sample():
    seen: list[list[str]] = []

    class Greedy(FakeUser):
        async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
            seen.append(list(kwargs["hints"]))
            kwargs["hints"].clear()
            return await super().start_interaction(instance_id)

    manager = make_manager(make_context(make_engine("x"), interactions=[Greedy()]), n=3)
    await roll_out(manager, 1, interaction_kwargs={"name": "fake", "hints": ["a", "b"]})
    assert seen == [["a", "b"]] * 3


def test_training_and_validation_sample_in_their_own_way():
    context = make_tool_context(make_engine("x"))
    val = ValKwargsConfig(n=2, temperature=0.0)
    manager = make_manager(
        context, n=4, temperature=0.7, top_p=0.9, top_k=5, stop=["###"], val_kwargs=val
    )
    plan = manager.train_plan()
    assert (plan.name, plan.n) == ("train", 4)
    assert (plan.sampling.temperature, plan.sampling.top_p, plan.sampling.top_k) == (0.7, 0.9, 5)
    assert plan.sampling.stop == ("###",)
    assert plan.sampling.stop_token_ids == tiny_template().stop_token_ids
    plan = manager.val_plan("hard")
    assert (plan.name, plan.n, plan.sampling.temperature) == ("val-hard", 2, 0.0)


def test_a_greedy_rollout_takes_the_most_probable_token_once():
    manager = make_manager(
        make_tool_context(make_engine("x")), n=4, temperature=0.7, top_p=0.9, stop=["#"]
    )
    name, n, sampling, index_offset = manager.greedy_plan()
    assert (name, n, index_offset) == ("greedy", 1, 0)
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.0, 1.0, ("#",))


def test_a_prompt_that_is_repeated_in_a_step_has_other_seeds():
    manager = make_manager(make_tool_context(make_engine("x")), n=2)
    first, again = (
        manager.make_requests(
            make_prompts(2), manager.train_plan()._replace(index_offset=place), step=5
        )
        for place in (0, 2)
    )
    assert [request.batch_data_id for request in again] == [2, 2, 3, 3]
    assert not {request.uid for request in first} & {request.uid for request in again}
    assert len({request.seed for request in [*first, *again]}) == 8


def test_budgets_come_from_the_configuration_and_the_engine():
    engine = make_engine("x", max_model_len=500)
    context = make_tool_context(engine, max_tokens_per_turn=7, max_user_turns=2, max_tool_calls=3)
    budgets = make_manager(context, response=300, request_timeout_s=9.0).budgets
    assert (budgets.max_response_tokens, budgets.max_model_len) == (300, 500)
    assert (budgets.max_turn_tokens, budgets.max_user_turns, budgets.max_tool_calls) == (7, 2, 3)
    assert (budgets.timeout_s, budgets.max_assistant_turns) == (9.0, None)
    assert make_manager(context, max_model_len=400).budgets.max_model_len == 400
    assert make_manager(context, max_model_len=4000).budgets.max_model_len == 500


async def test_results_have_the_order_of_the_requests_however_long_each_took():
    def script(_ids: Sequence[int], _s: SamplingParams, request_id: str, _turn: int) -> Answer:
        return ScriptedAnswer(request_id, delay_s=0.02 / (1 + int(request_id[-1])))

    manager = make_manager(make_context(make_scripted(script)), n=5)
    finished: list[str] = []
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    done = await manager.rollout(requests, on_finished=lambda r: finished.append(r.request_id))
    assert done == requests
    assert [r.messages[-1].content for r in done] == [r.request_id for r in requests]
    assert finished != [r.request_id for r in requests]
    assert sorted(finished) == sorted(r.request_id for r in requests)


async def test_concurrent_requests_stay_below_the_limit():
    alive: Counter[str] = Counter()
    most = 0

    class Counting(FakeTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            nonlocal most
            alive[str(instance_id)] += 1
            most = max(most, alive.total())
            return await super().create(instance_id, **kwargs)

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            await super().release(instance_id, **kwargs)
            alive[instance_id] -= 1

    manager = make_manager(
        make_tool_context(make_engine(CALL, "Bern."), Counting()), n=12, max_concurrent_requests=3
    )
    done = await roll_out(manager, 1)
    assert most == 3
    assert all(r.stop_reason is StopReason.ANSWERED for r in done)


async def test_a_prompt_is_encoded_once_for_its_group():
    context = make_tool_context(make_engine(CALL, "Bern."))
    encoded = Counter[str]()
    plan_prompt = context.template.plan_prompt

    class CountingTemplate:
        def __getattr__(self, name: str) -> Any:
            return getattr(context.template, name)

        def plan_prompt(self, messages: Any, tools: Any = ()) -> Any:
            encoded[messages[0].text] += 1
            return plan_prompt(messages, tools)

    encoder: Any = context.encode_prompt
    encoder.__self__._template = CountingTemplate()
    done = await roll_out(make_manager(context, n=6), 2)
    assert encoded == {"Hi 0": 1, "Hi 1": 1}
    assert len({tuple(r.prompt_ids) for r in done}) == 2


# Failures


async def test_a_failed_request_is_kept_with_its_group():
    engine = failing("train-0-0-0-1")
    done = await roll_out(make_manager(make_tool_context(engine), n=3), 2)
    assert [r.state for r in done].count(RequestState.FAILED) == 1
    assert [r.in_baseline for r in done] == [True, False, True, True, True, True]
    assert [r.dropped for r in done] == [None] * 6


async def test_a_failure_drops_its_group_where_the_policy_says_so():
    manager = make_manager(
        make_tool_context(failing("train-0-0-0-1")), n=3, failure=FailureConfig(policy="drop_group")
    )
    done = await roll_out(manager, 2)
    assert [r.dropped is None for r in done] == [False] * 3 + [True] * 3
    assert [r.in_baseline for r in done] == [False] * 3 + [True] * 3
    assert [r.is_trained for r in done] == [False] * 3 + [True] * 3


async def test_a_failure_ends_the_run_where_the_policy_says_so():
    manager = make_manager(
        make_tool_context(failing("train-0-0-0-1")), n=3, failure=FailureConfig(policy="raise")
    )
    with pytest.raises(RolloutError, match="1 of 6 requests failed") as caught:
        await roll_out(manager, 2)
    assert "1 x engine: EngineError: gone" in str(caught.value)


async def test_failures_of_one_kind_are_counted_together_whatever_ids_they_name():
    def script(_ids: Sequence[int], _s: SamplingParams, request_id: str, turn: int) -> Answer:
        return EngineError(f"lost {request_id}") if request_id[-1] in "123" else "Bern."

    manager = make_manager(make_context(make_scripted(script)), n=4)
    requests = manager.make_requests(make_prompts(2), manager.train_plan())
    done = await manager.drive(requests)
    whole = FailureSummary.merge([FailureSummary.of(done[:4]), FailureSummary.of(done[4:])])
    assert whole == FailureSummary.of(done)
    assert whole.num_failed == 6
    assert whole.reasons == {(Fault.ENGINE, "EngineError"): 6}
    assert whole.describe_reasons() == f"6 x engine: EngineError: lost {done[1].request_id}"


@pytest.mark.parametrize(
    ("policy", "attempts", "in_baseline"),
    [("mask", [0, 0, 0], [True, False, True]), ("retry", [0, 1, 0], [True] * 3),
     ("drop_group", [0, 0, 0], [False] * 3)],
)  # fmt: skip
async def test_a_tool_that_fails_leaves_the_baseline_to_the_rest_of_its_group(
    policy: Any, attempts: list[int], in_baseline: list[bool]
):
    class Flaky(FakeTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            if instance_id.endswith("-1"):
                raise ValueError("gone")
            return "found"

    context = make_tool_context(failing(), Flaky(), on_tool_failure="fail")
    done = await roll_out(make_manager(context, n=3, failure=FailureConfig(policy=policy)), 1)
    assert [r.attempt for r in done] == attempts
    assert [r.in_baseline for r in done] == [r.is_trained for r in done] == in_baseline


@pytest.mark.parametrize("policy", ["mask", "retry", "drop_group"])
async def test_too_many_failures_end_the_run_under_every_policy(policy: str):
    engine = failing(*(f"train-0-0-0-{i}{again}" for i in range(4) for again in ("", "~1")))
    failure = FailureConfig(policy=policy, max_failed_frac=0.5)  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="4 of 6"):
        await roll_out(make_manager(make_tool_context(engine), n=6, failure=failure), 1)
    engine = failing(*(f"train-0-0-0-{i}{again}" for i in range(3) for again in ("", "~1")))
    await roll_out(make_manager(make_tool_context(engine), n=6, failure=failure), 1)


async def test_a_retry_is_a_new_request_of_the_same_group():
    tool = FakeTool(opening="Open.")
    engine = failing("train-0-0-0-1", "train-0-0-0-1~1", "train-0-0-0-2")
    failure = FailureConfig(policy="retry", max_retries=2)
    finished: list[str] = []
    manager = make_manager(make_tool_context(engine, tool), n=3, failure=failure)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    done = await manager.rollout(requests, on_finished=lambda r: finished.append(r.request_id))
    assert [r.request_id for r in done] == ["train-0-0-0-0", "train-0-0-0-1~2", "train-0-0-0-2~1"]
    assert sorted(finished) == sorted(r.request_id for r in done)
    assert [r.attempt for r in done] == [0, 2, 1]
    assert len({r.uid for r in done}) == 1
    assert all(r.stop_reason is StopReason.ANSWERED for r in done)
    assert [r.rollout_offset for r in done] == [0, 1, 2]
    assert [len(r.messages) for r in done] == [5, 5, 5]
    for request in done:
        assert_invariants(request, engine)
    assert len(tool.lives) == 6
    check_life(tool.lives, "create", "release")


async def test_what_was_aborted_is_not_tried_again():
    engine = make_engine(ScriptedAnswer("late", delay_s=60))
    failure = FailureConfig(policy="retry", max_failed_frac=1.0)
    manager = make_manager(make_context(engine), n=2, failure=failure)
    task = asyncio.create_task(roll_out(manager, 1))
    await until(lambda: len(engine.calls) == 2)
    for offset in range(2):
        await engine.abort(f"train-0-0-0-{offset}")
    done = await task
    assert [r.stop_reason for r in done] == [StopReason.ABORTED] * 2
    assert len(engine.calls) == 2


async def test_cancelling_ends_and_releases_everything_even_what_had_not_begun():
    tool, user = FakeTool(), FakeUser()
    engine = make_engine(CALL, ScriptedAnswer("late", delay_s=60))
    context = make_context(engine, tools=[tool], interactions=[user])
    manager = make_manager(context, n=6, max_concurrent_requests=2)
    prompts = make_prompts(1, interaction_kwargs={"name": "fake"})
    requests = manager.make_requests(prompts, manager.train_plan())
    task = asyncio.create_task(manager.rollout(requests))
    await until(lambda: len(engine.calls) == 4)  # both requests wait for their second answer
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [r.stop_reason for r in requests] == [StopReason.ABORTED] * 6
    assert all(r.error is not None for r in requests)
    assert len(tool.lives) == len(user.lives) == 2
    check_life(tool.lives, "create", "release")
    check_life(user.lives, "start", "finalize")


@pytest.mark.parametrize(("num_broken", "error"), [(1, ZeroDivisionError), (3, ExceptionGroup)])
async def test_a_progress_bar_that_breaks_releases_everything_too(num_broken: int, error: Any):
    tool = FakeTool()
    manager = make_manager(make_tool_context(make_engine(CALL, "Bern."), tool), n=3)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())

    def broken(request: AsyncRolloutRequest) -> None:
        if request.rollout_offset < num_broken:
            raise ZeroDivisionError

    with pytest.raises(error):
        await manager.rollout(requests, on_finished=broken)
    assert all(r.is_finished for r in requests)
    check_life(tool.lives, "create", "release")


async def test_a_request_that_is_not_pending_is_refused():
    manager = make_manager(make_tool_context(make_engine("Bern.")), n=2)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    requests[1].take_edge(RequestState.RUNNING)
    with pytest.raises(TransitionError, match=f"{requests[1].request_id} is running, not pending"):
        await manager.rollout(requests)


def test_nothing_to_roll_out_is_no_failure():
    assert asyncio.run(make_manager(make_tool_context(make_engine("x"))).rollout([])) == []


FAILURES = [
    EngineError("gone"),
    RuntimeError("boom"),
    asyncio.CancelledError(),
    TimeoutError("late"),
    ScriptedAnswer([1, 2], log_probs=[-1.0, float("nan")]),
]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_failures_are_data_a_failure_changes_no_token_of_another_request(data: st.DataObject):
    number = data.draw(st.integers(2, 5))
    broken = data.draw(st.sets(st.integers(0, number - 1), max_size=number - 1))
    failure = data.draw(st.sampled_from(FAILURES))
    where = data.draw(st.sampled_from(["engine", "tool", "user", "create"]))
    room = data.draw(st.integers(1, 3))
    deterministic = data.draw(st.booleans())

    def tokens(ill: set[int]) -> list[tuple[Any, ...]]:
        ids = {f"train-0-0-0-{offset}" for offset in ill}
        mode = {"max_concurrent_requests": room, "deterministic": deterministic}
        done = asyncio.run(_group(number, ids, where, failure, mode))
        assert all(r.is_finished for r in done)
        return [
            (r.prompt_ids, r.response_ids, r.loss_mask, r.stop_reason, r.tool_rewards) for r in done
        ]

    healthy, mixed = tokens(set()), tokens(broken)
    for offset in set(range(number)) - broken:
        assert mixed[offset] == healthy[offset]
        assert f"train-0-0-0-{offset}" in decode(mixed[offset][1])


async def _group(
    number: int, ill: set[str], where: str, failure: Any, mode: dict[str, Any]
) -> list[AsyncRolloutRequest]:
    class Tool(FakeTool):
        async def _enter(self, method: str, instance_id: str, kwargs: dict[str, Any]) -> None:
            place = {"create": "create", "execute": "tool"}.get(method)
            if place == where and instance_id in ill:
                raise failure if isinstance(failure, BaseException) else SystemExit(3)
            await super()._enter(method, instance_id, kwargs)

    class User(FakeUser):
        async def _enter(self, method: str, instance_id: str) -> None:
            if where == "user" and method == "respond" and instance_id in ill:
                raise failure if isinstance(failure, BaseException) else SystemExit(3)
            await super()._enter(method, instance_id)

    def script(_ids: Sequence[int], _s: SamplingParams, request_id: str, turn: int) -> Answer:
        if where == "engine" and turn and request_id in ill:
            return failure
        return f"I am {request_id}." if turn else CALL

    context = make_context(make_scripted(script), tools=[Tool()], interactions=[User("Sure?")])
    failing_is_fine = FailureConfig(max_failed_frac=1.0)
    manager = make_manager(context, n=number, failure=failing_is_fine, **mode)
    prompts = make_prompts(1, interaction_kwargs={"name": "fake"})
    return await manager.rollout(manager.make_requests(prompts, manager.train_plan()))
