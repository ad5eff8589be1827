"""When the bundled interactions are asked, and where their scores stand."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.interactions import BaseInteraction
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction
from agentrl.interactions.gym_interaction import GymInteraction
from agentrl.interactions.user_simulator_interaction import UserSimulatorInteraction
from agentrl.rewards.scoring import make_extra_info
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from tests.fakes.chat_server import in_turn, serving
from tests.fakes.plugins import FakeTool, calling, make_context, make_engine, make_request

NAME = {"name": "it"}


@asynccontextmanager
async def a_gsm8k_user() -> AsyncIterator[BaseInteraction]:
    yield Gsm8kInteraction(NAME)


@asynccontextmanager
async def an_environment() -> AsyncIterator[BaseInteraction]:
    yield GymInteraction({**NAME, "env": "tests.fakes.envs:Corridor"})


@asynccontextmanager
async def a_simulated_user() -> AsyncIterator[BaseInteraction]:
    async with serving(in_turn("Go on.", "0", "###STOP###", "1")) as fake:
        config = {"chat": fake.config(), "goal": "x", "goal_check": "y"}
        user = UserSimulatorInteraction({**NAME, **config, "goal_check_at": "every_turn"})
        yield user
        await user.shutdown()


BUNDLED = pytest.mark.parametrize(
    ("opened", "answers"),
    [
        (a_gsm8k_user, ("#### 1", "#### 2")),
        (an_environment, ("right", "right")),
        (a_simulated_user, ("Hi.", "Bye.")),
    ],
    ids=["gsm8k", "gym", "user"],
)


async def roll_out(
    interaction: BaseInteraction, *answers: str, **multi_turn: Any
) -> AsyncRolloutRequest:
    engine = make_engine(*answers)
    context = make_context(engine, tools=[FakeTool()], interactions=[interaction], **multi_turn)
    return await run_request(make_request(interaction_kwargs=NAME, ground_truth="2"), context)


@BUNDLED
async def test_scores_are_on_the_answers_that_they_judge(
    opened: Callable[[], Any], answers: tuple[str, str]
):
    async with opened() as interaction:
        request = await roll_out(interaction, *answers)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert [turn.reward for turn in request.turns] == [0.0, None, 1.0]
    assert request.reward_scores["user_turn_rewards"] == [0.0, 1.0]
    assert make_extra_info(request)["turn_scores"] == [0.0, 1.0]


@BUNDLED
@pytest.mark.parametrize(
    ("multi_turn", "with_tool", "heard"),
    [
        ({"interaction_interval": 2}, False, False),
        ({"interaction_interval": 2}, True, True),
        ({"interaction_prob": 0.0}, False, False),
    ],
)
async def test_an_answer_that_interval_or_draw_skips_is_not_judged(
    opened: Callable[[], Any],
    answers: tuple[str, str],
    multi_turn: dict[str, Any],
    with_tool: bool,
    heard: bool,
):
    said = [calling("lookup", q="x"), answers[0], answers[1]][not with_tool :]
    async with opened() as interaction:
        request = await roll_out(interaction, *said, **multi_turn)
    assert request.stop_reason is StopReason.ANSWERED
    assert request.reward_scores["user_turn_rewards"] == [0.0] * heard
    assert request.num_user_turns == heard
