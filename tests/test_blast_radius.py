# pyright: reportIncompatibleMethodOverride=false
"""One request of many gets every fault there is: the others finish as if it had none.

A model samples with the embedded engine in deterministic mode. What the others sample is the same
token by token; log-probabilities may differ in their last bits, as the faulty one leaves their
batches earlier.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from agentrl.algorithms import compute_advantage
from agentrl.collate import collate
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.engines import TransformersEngine
from agentrl.engines.protocol import Completion, EngineCall
from agentrl.engines.transformers.requests import Call
from agentrl.errors import Fault
from agentrl.interactions import InteractionResult
from agentrl.messages import ToolResponse
from agentrl.rewards import NaiveRewardManager
from agentrl.rewards.scoring import solution_text
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.plugins import check_life
from tests.fakes.scheduling import Scenario, SlowTool, SlowUser, random_time, tokens

VICTIM = "train-0-0-1-2"
TIMEOUT_S = 1.0
BLOCK_S = 1.5
"""Longer than the time-out of everybody else's call."""
TEN_MB = "ten megabytes " * 750_000

Act = Callable[[Any], Awaitable[Any]]
"""From what a method would have returned to what it does instead."""

late_s: list[float] = []
"""How long a hanging call was let hang."""


async def fails(_: Any) -> Any:
    raise ValueError("secret detail")


async def hangs(_: Any) -> Any:
    started = time.monotonic()
    try:
        await asyncio.Event().wait()
    finally:
        late_s.append(time.monotonic() - started)


async def fails_when_cancelled(value: Any) -> Any:
    try:
        await hangs(value)
    except asyncio.CancelledError:
        raise ValueError("not now") from None


async def ignores_cancellation(_: Any) -> Any:
    started = time.monotonic()
    while time.monotonic() - started < 2 * TIMEOUT_S:
        try:
            await asyncio.sleep(2 * TIMEOUT_S)
        except asyncio.CancelledError:
            if not late_s:  # later ones come from the end of the event loop
                late_s.append(time.monotonic() - started)


async def exits(_: Any) -> Any:
    raise SystemExit(3)


async def interrupts(_: Any) -> Any:
    raise KeyboardInterrupt


async def cancels_itself(_: Any) -> Any:
    raise asyncio.CancelledError


async def blocks(value: Any) -> Any:
    time.sleep(BLOCK_S)  # noqa: ASYNC251 - that is what it is for
    return value


async def returns_none(_: Any) -> Any:
    return None


async def returns_ten_megabytes(value: Any) -> Any:
    if isinstance(value, InteractionResult):
        return value._replace(content=TEN_MB)
    return (value[0], ToolResponse(text=TEN_MB)) if isinstance(value, tuple) else TEN_MB


async def returns_nan(_: Any) -> float:
    return float("nan")


HANGS = (hangs, fails_when_cancelled, ignores_cancellation)


class OneFault:
    """Strikes the victim once, in one method."""

    def __init__(self, site: str) -> None:
        self._left = [(site, VICTIM)]

    def strikes(self, method: str, instance_id: Any) -> bool:
        """Whether it does now."""
        is_hit = (method, instance_id) in self._left
        if is_hit:
            self._left.clear()
        return is_hit


class FaultyTool(SlowTool):
    """In one method, for the victim alone, does something else, while the others are at work."""

    hasty = VICTIM

    def __init__(self, site: str, act: Act) -> None:
        super().__init__(random_time(1))
        self.fault, self.act = OneFault(site), act

    async def _or_act(self, method: str, instance_id: Any, value: Any) -> Any:
        return await self.act(value) if self.fault.strikes(method, instance_id) else value

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await self._or_act("create", instance_id, await super().create(instance_id))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        found = await super().execute(instance_id, parameters)
        return await self._or_act("execute", instance_id, found)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._or_act("reward", instance_id, await super().calc_reward(instance_id))

    async def release(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._or_act("release", instance_id, await super().release(instance_id))


class FaultyUser(SlowUser):
    """In one method, for the victim alone, does something else, while the others are at work."""

    hasty = VICTIM

    def __init__(self, site: str, act: Act) -> None:
        super().__init__(random_time(2), "Sure?", "Really?")
        self.fault, self.act = OneFault(site), act

    async def _or_act(self, method: str, instance_id: Any, value: Any) -> Any:
        return await self.act(value) if self.fault.strikes(method, instance_id) else value

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await self._or_act(
            "start", instance_id, await super().start_interaction(instance_id)
        )

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:
        reply = await super().generate_response(instance_id, messages)
        return await self._or_act("respond", instance_id, reply)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        await super().finalize_interaction(instance_id)
        return await self._or_act("finalize", instance_id, None)


@dataclass(frozen=True)
class Story:
    """One rollout with a fault, beside one without."""

    healthy: list[AsyncRolloutRequest]
    mixed: list[AsyncRolloutRequest]
    tool: FaultyTool
    user: FaultyUser

    @property
    def victim(self) -> AsyncRolloutRequest:
        return _victim(self.mixed)

    @property
    def unhurt(self) -> AsyncRolloutRequest:
        """The victim, where nothing happened to it."""
        return _victim(self.healthy)

    def check_others(self) -> None:
        """Hold every other request against what it is without the fault; and look at lives."""
        for was, now in zip(self.healthy, self.mixed, strict=True):
            if now is not self.victim:
                check_same(was, now)
        check_life(self.tool.lives, "create", "release")
        check_life(self.user.lives, "start", "finalize")
        assert len(self.tool.lives) == len(self.mixed)


def _victim(requests: Sequence[AsyncRolloutRequest]) -> AsyncRolloutRequest:
    return next(request for request in requests if request.request_id == VICTIM)


def check_same(was: AsyncRolloutRequest, now: AsyncRolloutRequest) -> None:
    assert now.state is RequestState.COMPLETED
    assert now.stop_reason is was.stop_reason
    assert tokens(now) == tokens(was)
    assert now.rollout_log_probs == pytest.approx(was.rollout_log_probs, abs=1e-5)
    assert now.messages == was.messages
    assert (now.tool_rewards, now.reward) == (was.tool_rewards, was.reward)
    outcomes = [[call.outcome for call in turn.calls] for turn in now.turns]
    assert outcomes == [[call.outcome for call in turn.calls] for turn in was.turns]


def make_scenario(num_prompts: int, tool: FaultyTool, user: FaultyUser) -> Scenario:
    times = {"tool_timeout_s": TIMEOUT_S, "interaction_timeout_s": TIMEOUT_S}
    return Scenario(num_prompts=num_prompts, tool=tool, user=user, multi_turn=times)


@cache
def healthy(num_prompts: int) -> list[AsyncRolloutRequest]:
    """Run once without a fault."""
    nothing = FaultyTool("", fails), FaultyUser("", fails)
    requests = make_scenario(num_prompts, *nothing).run_fresh()
    victim = _victim(requests)
    assert any(call.outcome == "ok" for turn in victim.turns for call in turn.calls)
    assert victim.num_user_turns
    return requests


def tell(
    num_prompts: int,
    site: str = "",
    act: Act = fails,
    kind: type[TransformersEngine] = TransformersEngine,
) -> Story:
    tool, user = FaultyTool(site, act), FaultyUser(site, act)
    late_s.clear()
    mixed = make_scenario(num_prompts, tool, user).run_fresh(kind)
    return Story(healthy(num_prompts), mixed, tool, user)


NUM_PROMPTS = 16
"""Of four samples each: one of 64 requests is the victim."""


def everyday_and_slow(often: Sequence[Any], rarely: Sequence[Any]) -> Any:
    """Few requests and faults in the everyday part, all requests and faults in the slow one."""
    return pytest.mark.parametrize(
        ("act", "num_prompts"),
        [(act, 2) for act in often]
        + [pytest.param(act, NUM_PROMPTS, marks=pytest.mark.slow) for act in (*often, *rarely)],
    )


def check_hang() -> None:
    """A hang overruns its time-out by at most a tenth."""
    assert len(late_s) == 1
    assert 0.9 * TIMEOUT_S <= late_s[0] <= 1.1 * TIMEOUT_S


def check_failed(request: AsyncRolloutRequest, fault: Fault) -> None:
    """A failure of the infrastructure: out of the baseline, out of the loss, and said whose."""
    assert (request.state, request.stop_reason) == (RequestState.FAILED, StopReason.FAILED)
    assert request.error is not None
    assert request.error.fault is fault
    assert not request.in_baseline
    assert not request.is_trained


# Executions: the model is told, neutrally, and goes on.


@everyday_and_slow(
    often=[fails, exits, returns_none],
    rarely=[interrupts, cancels_itself],
)
def test_a_failing_execution_is_reported_to_its_own_model_alone(act: Act, num_prompts: int):
    story = tell(num_prompts, "execute", act)
    story.check_others()
    calls = [call for turn in story.victim.turns for call in turn.calls]
    assert [call.outcome for call in calls].count("crashed") == 1
    assert story.victim.state is RequestState.COMPLETED
    shown = [message.text for message in story.victim.messages if message.role == "tool"]
    assert not any("secret" in text for text in shown)


@everyday_and_slow(often=[hangs], rarely=[fails_when_cancelled, ignores_cancellation])
def test_an_execution_that_hangs_ends_with_its_time_out(act: Act, num_prompts: int):
    story = tell(num_prompts, "execute", act)
    story.check_others()
    check_hang()
    calls = [call for turn in story.victim.turns for call in turn.calls]
    late = [call for call in calls if call.outcome == "timeout"]
    assert len(late) == 1
    assert 0.9 * TIMEOUT_S <= late[0].seconds <= 1.1 * TIMEOUT_S
    assert story.victim.state is RequestState.COMPLETED


@everyday_and_slow(often=[returns_ten_megabytes], rarely=[])
def test_an_execution_that_returns_ten_megabytes_is_cut(act: Act, num_prompts: int):
    story = tell(num_prompts, "execute", act)
    story.check_others()
    calls = [call for turn in story.victim.turns for call in turn.calls]
    cut = [call for call in calls if call.num_cut_tokens > 1_000_000]
    assert len(cut) == 1
    assert all(call.num_tokens <= 64 for call in calls)


# What blocks the event loop holds everybody up, and costs nobody an answer.


@pytest.mark.parametrize("site", ["execute", "respond"])
@everyday_and_slow(often=[], rarely=[blocks])
def test_a_plugin_that_blocks_the_loop_is_named_and_costs_no_answer(
    act: Act, num_prompts: int, site: str, caplog: pytest.LogCaptureFixture
):
    check_blocking(site, num_prompts, caplog)


def test_a_tool_that_blocks_the_loop_is_named_and_costs_no_answer(
    caplog: pytest.LogCaptureFixture,
):
    check_blocking("execute", 2, caplog)


def check_blocking(site: str, num_prompts: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        story = tell(num_prompts, site, blocks)
    story.check_others()
    check_same(story.unhurt, story.victim)
    named = [r.getMessage() for r in caplog.records if "blocked the event loop" in r.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("tool:lookup" if site == "execute" else "interaction:fake")
    assert "time.sleep(BLOCK_S)" in named[0]


# The rest of a tool's life, and of a user's: the request fails, whose fault it was is said.

LIVES = {"create": Fault.TOOL, "reward": Fault.TOOL, "start": Fault.INTERACTION,
         "respond": Fault.INTERACTION}  # fmt: skip


@pytest.mark.parametrize("site", LIVES)
@everyday_and_slow(often=[], rarely=[fails, exits, interrupts, cancels_itself])
def test_a_life_that_breaks_fails_its_own_request_alone(act: Act, num_prompts: int, site: str):
    story = tell(num_prompts, site, act)
    story.check_others()
    check_failed(story.victim, LIVES[site])


@pytest.mark.parametrize("site", LIVES)
@everyday_and_slow(often=[], rarely=HANGS)
def test_a_life_that_hangs_fails_its_own_request_alone(act: Act, num_prompts: int, site: str):
    story = tell(num_prompts, site, act)
    story.check_others()
    check_failed(story.victim, LIVES[site])
    check_hang()


@pytest.mark.parametrize(
    ("act", "site"), [(returns_nan, "reward"), (returns_none, "respond"), (returns_nan, "respond")]
)
def test_an_answer_that_is_none_fails_its_own_request_alone(act: Act, site: str):
    story = tell(2, site, act)
    story.check_others()
    check_failed(story.victim, LIVES[site])


@everyday_and_slow(often=[], rarely=[returns_ten_megabytes])
@pytest.mark.parametrize("site", ["create", "respond"])
def test_an_opening_or_a_reply_of_ten_megabytes_is_cut(act: Act, num_prompts: int, site: str):
    story = tell(num_prompts, site, act)
    story.check_others()
    assert story.victim.state is RequestState.COMPLETED
    cut = [turn.num_cut_tokens for turn in story.victim.turns]
    assert max([*cut, story.victim.num_cut_prompt_tokens]) > 1_000_000
    assert story.victim.num_prompt_tokens < 2 * story.unhurt.num_prompt_tokens


@pytest.mark.parametrize("site", ["release", "finalize"])
@everyday_and_slow(often=[fails], rarely=[exits, *HANGS])
def test_a_failing_release_costs_nothing(act: Act, num_prompts: int, site: str):
    story = tell(num_prompts, site, act)
    story.check_others()
    check_same(story.unhurt, story.victim)
    assert story.victim.metrics["release_failures"] == 1
    if act in HANGS:
        check_hang()


# The engine.


class RefusingEngine(TransformersEngine):
    """Is given ids that it does not know in the victim's second turn."""

    num_turns = 0

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> list[Completion | BaseException]:
        return await super().generate_together([self._spoiled(call) for call in calls])

    def _spoiled(self, call: EngineCall) -> EngineCall:
        self.num_turns += call.request_id == VICTIM
        if call.request_id != VICTIM or self.num_turns != 2:
            return call
        return EngineCall(input_ids=[10**6], sampling=call.sampling, request_id=VICTIM)


@pytest.mark.parametrize("num_prompts", [2, pytest.param(NUM_PROMPTS, marks=pytest.mark.slow)])
def test_an_engine_error_fails_its_own_request_alone(num_prompts: int):
    story = tell(num_prompts, kind=RefusingEngine)
    story.check_others()
    check_failed(story.victim, Fault.ENGINE)
    assert story.victim.num_assistant_turns == 1


@pytest.mark.parametrize("num_prompts", [2, pytest.param(NUM_PROMPTS, marks=pytest.mark.slow)])
def test_logits_that_are_not_finite_fail_their_own_request_alone(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
):
    """The engine's cache is dropped under the others, which compute theirs anew."""
    take = Call.append

    def diverge(call: Call, token_id: int, log_prob: float) -> Any:
        is_hit = call.request_id == VICTIM and len(call.token_ids) == 3
        return take(call, token_id, float("nan") if is_hit else log_prob)

    healthy(num_prompts)
    monkeypatch.setattr(Call, "append", diverge)
    story = tell(num_prompts)
    story.check_others()
    check_failed(story.victim, Fault.ENGINE)
    assert "not finite" in story.victim.error.message  # pyright: ignore[reportOptionalMemberAccess]


# The scorer, and what "a failed request is data" says of the group.


@everyday_and_slow(
    often=[fails, exits, cancels_itself, hangs, returns_none, returns_nan],
    rarely=[interrupts, fails_when_cancelled, ignores_cancellation],
)
def test_failures_are_data_a_scorer_that_breaks_leaves_the_baseline_to_the_rest_of_the_group(
    act: Act, num_prompts: int
):
    requests = [request.model_copy(deep=True) for request in healthy(num_prompts)]
    victim = _victim(requests)

    async def compute_score(solution_str: str, extra_info: Any, **_: Any) -> Any:
        value = float(len(solution_str) % 5)
        return await act(value) if solution_str == solution_text(victim) else value

    late_s.clear()
    config = RewardConfig(timeout_s=TIMEOUT_S)
    asyncio.run(NaiveRewardManager(compute_score, config).score(requests))
    check_failed(victim, Fault.REWARD)
    if act in HANGS:
        check_hang()
    others = [request for request in requests if request is not victim]
    assert all(request.reward is not None for request in others)
    with_victim, without = advantages(requests), advantages(others)
    assert with_victim.pop(VICTIM).count_nonzero() == 0
    assert with_victim.keys() == without.keys()
    for name, expected in without.items():
        torch.testing.assert_close(with_victim[name], expected)


def advantages(requests: Sequence[AsyncRolloutRequest]) -> dict[str, torch.Tensor]:
    """Advantages of the trained tokens, by request."""
    batch = collate(requests, pad_token_id=0)
    compute_advantage(batch, AlgorithmConfig())
    assert batch.batch is not None
    found = batch.batch["advantages"]
    lengths = [request.num_response_tokens for request in requests]
    return {
        request.request_id: row[:length]
        for request, row, length in zip(requests, found, lengths, strict=True)
    }
