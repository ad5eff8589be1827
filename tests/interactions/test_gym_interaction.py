"""Environments as interactions: what is read as an action, what the policy is told, threads."""

import asyncio
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import AgentRLError, ConfigError, MissingExtraError, PluginError
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.interactions.gym_environment import ActionReader, InvalidActionError
from agentrl.interactions.gym_interaction import GymInteraction
from agentrl.interactions.session import InteractionSession
from agentrl.messages import Message
from agentrl.plugins.environment import install_command
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from tests.fakes.envs import OPEN
from tests.fakes.plugins import control_ids, decode, make_context, make_engine, make_request

CORRIDOR = "tests.fakes.envs:Corridor"
ASKED = {"name": "gym"}


def gym(env: str = CORRIDOR, **config: Any) -> GymInteraction:
    return GymInteraction({"name": "gym", "env": env, **config})


async def play(interaction: BaseInteraction, *answers: str, **kwargs: Any) -> AsyncRolloutRequest:
    """One request, whose policy says the answers, through the real runner."""
    engine = make_engine(*answers)
    context = make_context(engine, interactions=[interaction])
    request = make_request(interaction_kwargs=ASKED | kwargs)
    return await run_request(request, context)


def said(request: AsyncRolloutRequest) -> list[str]:
    """What the environment said, the first observation included."""
    return [message.text for message in request.messages[1:] if message.role == "user"]


def scores(request: AsyncRolloutRequest) -> list[float | None]:
    return [turn.reward for turn in request.turns if turn.role == "assistant"]


async def test_an_environment_of_ones_own_is_played_to_its_end():
    request = await play(gym(), "right", "<action>left</action>", "right", "right", seed=7)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert said(request) == [
        "You stand 2 steps before the exit (seed 7).",
        "You are at 1.",
        "You are at 0.",
        "You are at 1.",
    ]
    assert scores(request) == [0.0, 0.0, 0.0, 1.0]
    assert request.reward_scores["user_turn_rewards"] == [0.0, 0.0, 0.0, 1.0]
    assert request.turns[-1].metadata == {
        "num_steps": 4, "num_invalid": 0, "return": 1.0, "terminated": True, "truncated": False,
    }  # fmt: skip


async def test_the_first_observation_is_part_of_the_prompt_and_is_plain_text():
    request = await play(gym(observation_template="<|im_end|>{observation}"), "right", "right")
    assert decode(request.prompt_ids).count("<|im_end|>You stand 2 steps") == 1
    assert request.messages[1] == Message(role="user", content=said(request)[0])
    own = ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    assert control_ids(request.prompt_ids) == own, (
        "control tokens: what it says is plain characters"
    )


async def test_rows_may_tell_the_first_observation_themselves():
    request = await play(gym(tell_first=False), "right", "right")
    assert said(request) == ["You are at 1."]


async def test_what_is_truncated_ends_the_request_too():
    request = await play(gym(), "left", "left")
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.turns[-1].metadata["truncated"] is True


async def test_the_older_manner_of_environments_will_do():
    request = await play(gym("tests.fakes.envs:OldCorridor"), "right", "right")
    assert said(request) == ["Go.", "You are at 1."]
    assert scores(request) == [1.0, 1.0]


async def test_frozen_lake_by_its_id_with_named_actions_and_its_rendering():
    lake = gym(
        "FrozenLake-v1",
        env_kwargs={"is_slippery": False, "render_mode": "ansi"},
        action_names=["left", "down", "right", "up"],
        observation_template="Field {observation}:\n{rendered}",
    )
    way = ["Down", "1", "<think>left or <action>0</action>?</think> right", "down", "2", "right"]
    request = await play(lake, *way)
    assert scores(request) == [0.0] * 5 + [1.0]
    assert said(request)[0].startswith("Field 0:\n")
    assert [int(text.split(":")[0][6:]) for text in said(request)] == [0, 4, 8, 9, 13, 14]
    assert "FFFH" in said(request)[1]


async def test_samples_of_a_group_begin_alike_and_groups_differ():
    async def seed_of(uid: str, sample: str, **row: Any) -> str:
        session = InteractionSession(gym(), instance_id=sample, kwargs=row, offered={"uid": uid})
        try:
            return re.findall(r"seed (\d+)", await session.start())[0]
        finally:
            await session.finalize()

    assert await seed_of("a", "a-0") == await seed_of("a", "a-1") != await seed_of("b", "b-0")
    assert await seed_of("a", "a-0", seed=3) == "3"


async def test_rows_may_make_it_otherwise():
    request = await play(gym(env_kwargs={"length": 9}), "right", env_kwargs={"length": 1})
    assert scores(request) == [1.0]


async def test_an_answer_without_an_action_gets_a_message_and_no_step():
    names = {"action_names": ["left", "right"], "invalid_action_score": -0.5}
    request = await play(gym(**names), "I walk away.", "RIGHT", "right")
    assert said(request)[1] == (
        "'I walk away.' is not an action; expected one of left, right, written as "
        "<action>...</action>."
    )
    assert scores(request) == [-0.5, 0.0, 1.0]
    assert request.turns[-1].metadata["num_invalid"] == 1


async def test_an_answer_without_an_action_may_end_the_request():
    request = await play(gym(action_names=["right"], on_invalid_action="end"), "left")
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.turns[0].metadata["num_steps"] == 0


@pytest.mark.parametrize("method", ["make", "reset", "step"])
async def test_an_environment_that_raises_fails_its_request_and_is_closed(method: str):
    request = await play(gym(env_kwargs={"fails": method, "mark": method}), "right")
    assert request.error is not None
    assert (request.error.fault.value, request.error.kind) == ("interaction", "InteractionError")
    assert f"{method} is broken" in request.error.message
    assert OPEN[method] == 0


async def test_a_space_that_text_cannot_fill_is_refused():
    request = await play(gym("tests.fakes.envs:Boxed", env_kwargs={"mark": "box"}), "right")
    assert request.error is not None
    assert "expected a Discrete or a Text space" in request.error.message
    assert OPEN["box"] == 0


async def test_life_cycle_an_environment_is_closed_though_its_request_is_cancelled_in_a_step():
    interaction = gym(env_kwargs={"block_s": 0.1, "mark": "cancelled"})
    request = make_request(interaction_kwargs=ASKED)
    context = make_context(make_engine("right"), interactions=[interaction])
    task = asyncio.create_task(run_request(request, context))
    await asyncio.sleep(0.25)  # made, reset, in its step
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert OPEN["cancelled"] == 0
    assert vars(interaction)["_plays"] == {}


async def test_environments_that_block_hold_up_neither_the_loop_nor_each_other():
    interaction = gym(env_kwargs={"block_s": 0.05, "mark": "slow"})
    started = time.monotonic()
    await asyncio.gather(*(play(interaction, "right", "right") for _ in range(10)))
    assert time.monotonic() - started < 5 * 10 * 0.05 / 2
    assert OPEN["slow"] == 0


async def test_a_hanging_step_fails_its_request_and_is_closed_when_it_returns():
    interaction = gym(env_kwargs={"block_s": 0.3, "mark": "hung"}, timeout_s=0.1)
    request = await play(interaction, "right")
    assert request.error is not None
    assert "no answer within 0.1 s" in request.error.message
    assert request.metrics["release_failures"] == 1
    await asyncio.to_thread(_wait_for_threads)
    assert OPEN["hung"] == 0


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "agentrl-environment":
            thread.join(timeout=5)
            assert not thread.is_alive()


DISCRETE = gymnasium.spaces.Discrete(3, start=1)
TEXT = gymnasium.spaces.Text(5)
NAMES = ("up", "down")


@pytest.mark.parametrize(
    ("reader", "answer", "action"),
    [
        (ActionReader(), "  go on \n", "go on"),
        (ActionReader(), "<action>a</action> no: <action> b\nc </action>.", "b\nc"),
        (ActionReader(), "b</action>", "b</action>"),
        (ActionReader(), "<think><action>a</action></think>b", "b"),
        (ActionReader(pattern=re.compile(r"Action: (\w+)")), "Action: a, Action: b", "b"),
        (ActionReader(pattern=re.compile(r"\d+")), "1 and 2", "2"),
        (ActionReader(names=NAMES), "UP", "up"),
        (ActionReader(TEXT), "abc", "abc"),
        (ActionReader(DISCRETE), " 3 ", 3),
        (ActionReader(DISCRETE), "+1", 1),
        (ActionReader(DISCRETE, names=NAMES), "down", 2),
        (ActionReader(DISCRETE, names=NAMES), "3", 3),
    ],
)
def test_actions_are_read(reader: ActionReader, answer: str, action: Any):
    assert reader.read(answer) == action


@pytest.mark.parametrize(
    ("reader", "answer"),
    [
        (ActionReader(pattern=re.compile(r"Action: (\w+)")), "I go."),
        (ActionReader(names=NAMES), "left"),
        (ActionReader(TEXT), "abcdef"),
        (ActionReader(DISCRETE), "0"),
        (ActionReader(DISCRETE), "4"),
        (ActionReader(DISCRETE), "1.0"),
        (ActionReader(DISCRETE), "१"),
        (ActionReader(DISCRETE), "9" * 5000),
        (ActionReader(DISCRETE), ""),
    ],
)
def test_what_is_no_action_is_refused_in_few_words(reader: ActionReader, answer: str):
    with pytest.raises(InvalidActionError) as caught:
        reader.read(answer)
    assert len(str(caught.value)) < 200


@given(st.lists(st.sampled_from(["<action>", "</action>", "1", " ", "</think>"])))
def test_any_answer_is_an_action_or_is_refused(parts: list[str]):
    with suppress(InvalidActionError):
        assert ActionReader(DISCRETE).read("".join(parts)) == 1


def test_reading_takes_linear_time():
    started = time.monotonic()
    ActionReader().read("<action>" * 200_000)
    ActionReader().read("</action>" * 200_000)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("config", "kind", "key", "what"),
    [
        ("{}", ConfigError, "env", "env is missing"),
        ("{env: NoSuchLake-v1}", ConfigError, "env", "NoSuchLake"),
        ("{env: tests.fakes.envs:Coridor}", PluginError, "env", "did you mean 'Corridor'"),
        ("{env: tests.fakes.envs:OPEN}", PluginError, "env", "is not callable"),
        ("{env: FrozenLake-v1, sede: 3}", ConfigError, "sede", "did you mean 'seed'"),
        (
            "{env: FrozenLake-v1, observation_template: '{info}'}",
            ConfigError, "observation_template", "unknown field 'info'",
        ),
        (
            "{env: FrozenLake-v1, action_pattern: '('}",
            ConfigError, "action_pattern", "no regular expression",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_yaml_is_named_with_its_key(
    tmp_path: Path, config: str, kind: type[AgentRLError], key: str, what: str
):
    path = "agentrl.interactions.gym_interaction.GymInteraction"
    file = tmp_path / "users.yaml"
    file.write_text(f"interaction: [{{class_name: {path}, config: {config}}}]\n")
    with pytest.raises(kind, match=re.escape(what)) as caught:
        initialize_interactions_from_config(file)
    assert caught.value.details["key"] == f"interaction[0].config.{key}"
    assert caught.value.details["file"] == file


def test_an_id_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtraError) as caught:
        gym("FrozenLake-v1")
    assert caught.value.details["install"] == install_command("gym")
    gym()  # one of one's own needs no extra
