"""Users that a language model plays: what it is told, when it ends, what fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.interactions.user_simulator_interaction import UserSimulatorInteraction
from agentrl.interactions.user_simulator_prompts import Role, read_verdict, user_messages
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from tests.fakes.chat_server import KEY, FakeChat, in_turn, serving
from tests.fakes.plugins import FakeTool, calling, make_context, make_engine, make_request

ASKED = {"name": "user"}


@asynccontextmanager
async def user_of(fake: FakeChat, **config: Any) -> AsyncIterator[UserSimulatorInteraction]:
    chat = fake.config(**config.pop("chat", {}))
    user = UserSimulatorInteraction({"name": "user", "chat": chat, "persona": "A cook."} | config)
    try:
        yield user
        assert vars(user)["_talks"] == {}
    finally:
        await user.shutdown()


async def talk(
    user: UserSimulatorInteraction, *answers: str, tools: Any = (), **row: Any
) -> AsyncRolloutRequest:
    """One request, whose policy says the answers, through the real runner."""
    context = make_context(make_engine(*answers), interactions=[user], tools=tools)
    request = make_request(
        "I want soup.", interaction_kwargs=ASKED | row, ground_truth="leek", request_id="r"
    )
    return await run_request(request, context)


async def test_the_roles_are_swapped_and_the_persona_is_given_once():
    serve = serving(in_turn("Which herbs?", "Thanks! ###STOP###"))
    async with serve as fake, user_of(fake, goal="Soup.") as user:
        request = await talk(user, "Take leeks.", "<think>hm</think>Thyme.")
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert [message.text for message in request.messages] == [
        "I want soup.", "Take leeks.", "Which herbs?", "<think>hm</think>Thyme.",
    ]  # fmt: skip
    system, *rest = fake.asked[1]["messages"]
    assert (system["role"], system["content"].count("A cook.")) == ("system", 1)
    assert "What the user wants: Soup." in system["content"]
    assert [(message["role"], message["content"]) for message in rest[1:]] == [
        ("assistant", "I want soup."),
        ("user", "Take leeks."),
        ("assistant", "Which herbs?"),
        ("user", "Thyme."),
    ]
    assert rest[0]["role"] == "user"
    assert not [body for body in fake.asked if "leek" in str(body).replace("leeks", "")]
    assert request.turns[0].reward is None
    assert request.turns[-1].metadata == {"num_calls": 2, "num_tokens": 30, "ended_by": "user"}


async def test_the_row_says_who_the_user_is():
    async with serving(in_turn("###STOP###")) as fake, user_of(fake, goal="Soup.") as user:
        await talk(user, "Hi.", persona="A sailor.", goal="Fish.")
    instructions = fake.asked[0]["messages"][0]["content"]
    assert "A sailor." in instructions
    assert "Fish." in instructions
    assert "A cook." not in instructions


async def test_a_row_without_a_part_fails():
    async with serving(in_turn("Hm.")) as fake, user_of(fake, persona="") as user:
        request = await talk(user, "Hi.")
    assert request.error is not None
    assert "expected a persona or a goal" in request.error.message


async def test_the_user_may_speak_first():
    serve = serving(in_turn("Soup, please!", "###STOP###"))
    async with serve as fake, user_of(fake, speaks_first=True) as user:
        request = await talk(user, "Of course.")
    assert [message.text for message in request.messages[:2]] == ["I want soup.", "Soup, please!"]


async def test_the_policy_cannot_end_the_conversation_by_the_phrase():
    serve = serving(in_turn("And then?", "###STOP###"))
    async with serve as fake, user_of(fake) as user:
        request = await talk(user, "###STOP###", "Bye.")
    assert request.num_user_turns == 1


async def test_the_phrase_may_be_another_one():
    async with serving(in_turn("Bye. <over>")) as fake, user_of(fake, stop_phrase="<over>") as user:
        request = await talk(user, "Hi.")
    assert request.num_user_turns == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_turns": 2}, "2 of 2 calls"),
        ({"max_tokens": 20}, "30 of 20 tokens"),
    ],
)
async def test_a_budget_that_is_spent_ends_the_conversation_and_says_so(
    limits: dict[str, Any], message: str
):
    async with serving(in_turn("Go on.")) as fake, user_of(fake, **limits) as user:
        request = await talk(user, "Hi.")
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.num_user_turns == 2
    metadata = request.turns[-1].metadata
    assert metadata["ended_by"] == "budget"
    assert message in metadata["budget"]


@pytest.mark.parametrize("limit", [{"max_calls": 1}, {"max_total_tokens": 15}])
async def test_a_budget_of_the_run_that_is_spent_is_the_interactions_failure(limit: dict[str, int]):
    async with serving(in_turn("Go on.")) as fake, user_of(fake, chat=limit, max_turns=3) as user:
        requests = [await talk(user, "Hi."), await talk(user, "Hi.")]
    assert len(fake.asked) == 1
    assert [request.stop_reason for request in requests] == [StopReason.FAILED] * 2
    for request in requests:
        assert request.error is not None
        assert (request.error.fault.value, "spent" in request.error.message) == (
            "interaction",
            True,
        )


async def test_a_goal_check_without_a_budget_is_no_end_without_a_score():
    serve = serving(in_turn("###STOP###"))
    async with serve as fake, user_of(fake, goal_check="Soup.", chat={"max_calls": 1}) as user:
        request = await talk(user, "Hi.")
    assert request.stop_reason is StopReason.FAILED


@pytest.mark.parametrize("answer", [500, 401, None, "", "<think>what n"])
async def test_a_model_without_a_reply_is_the_interactions_failure(answer: Any):
    keys = {"timeout_s": 0.1, "api_key": KEY}
    async with serving(in_turn(answer)) as fake, user_of(fake, chat=keys) as user:
        request = await talk(user, "Hi.")
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert request.error.fault.value == "interaction"
    assert KEY not in request.model_dump_json()


async def test_a_wait_for_a_place_is_no_fault_unless_the_config_says_so():
    for config, any_failed in [({}, False), ({"timeout_s": 0.25}, True)]:
        serve = serving(in_turn("###STOP###"), seconds=0.1)
        async with serve as fake, user_of(fake, chat={"max_concurrency": 1}, **config) as user:
            context = make_context(
                make_engine("Hi."), interactions=[user], interaction_timeout_s=0.25
            )
            asked = [make_request(interaction_kwargs=ASKED) for _ in range(4)]
            done = await asyncio.gather(*(run_request(request, context) for request in asked))
        assert any(request.error is not None for request in done) == any_failed


async def test_tools_are_hidden_or_shown_as_the_config_says():
    for show_tools, expected in [
        (False, ["Rain."]),
        (True, ['(calls lookup with {"q": "Bern"})', "(is told by lookup: found Bern)", "Rain."]),
    ]:
        serve = serving(in_turn("###STOP###"))
        async with serve as fake, user_of(fake, show_tools=show_tools) as user:
            await talk(user, calling("lookup", q="Bern"), "Rain.", tools=[FakeTool()])
        assert fake.asked[0]["messages"][-1]["content"] == "\n\n".join(expected)


async def test_the_goal_check_scores_the_end_in_a_call_of_its_own():
    serve = serving(in_turn("And salt?", "###STOP###", "It is half of it.\n**0.5**"))
    async with serve as fake, user_of(fake, goal_check="Soup is named.") as user:
        request = await talk(user, "Take leeks.", "Yes.")
    assert [turn.reward for turn in request.turns] == [None, None, 0.5]
    system, conversation = fake.asked[-1]["messages"]
    assert "Soup is named." in system["content"]
    assert '"text": "Take leeks."' in conversation["content"]
    assert request.turns[-1].metadata["num_calls"] == 3


async def test_the_goal_check_may_score_every_answer():
    serve = serving(in_turn("And salt?", "0", "###STOP###", "1"))
    check = {"goal_check": "Soup.", "goal_check_at": "every_turn"}
    async with serve as fake, user_of(fake, **check) as user:
        request = await talk(user, "Leeks.", "Yes.")
    assert request.reward_scores["user_turn_rewards"] == [0.0, 1.0]


async def test_a_verdict_that_is_none_is_the_interactions_failure():
    serve = serving(in_turn("###STOP###", "Well."))
    async with serve as fake, user_of(fake, goal_check="Soup.", max_unreadable=1) as user:
        request = await talk(user, "Leeks.")
    assert len(fake.asked) == 3, "it was asked once more"
    assert request.error is not None
    assert "expected a number from 0 to 1" in request.error.message


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("0", 0.0), ("1", 1.0), ("a\nScore: 0.25", 0.25), (".5", 0.5), ("1.00", 1.0), ("`0.`", 0.0),
     ("It was fine. 0.7", 0.7), ("**Score:** 1", 1.0), ("I would say 0.4.", 0.4), ("(0.5)", 0.5),
     ("My score is 1.", 1.0), ("From 0 to 1: 0.25", 0.25)],
)  # fmt: skip
def test_verdicts_are_read(text: str, verdict: float):
    assert read_verdict(text) == verdict


@pytest.mark.parametrize(
    "text",
    ["", "2", "1.5", "-1", "0.5\nwell", "1/2", "nan", "score: ten", "70%", "-0.5", "0,7", "7 / 1",
     "0.7 of 1", "It failed in turn 1", "a number from 0 to 1", "version2.0"],
)  # fmt: skip
def test_what_is_no_verdict_is_none(text: str):
    assert read_verdict(text) is None


async def test_a_verdict_that_cannot_be_read_is_asked_for_again_with_another_seed():
    serve = serving(in_turn("###STOP###", "Well.", "Hm.", "It was fine. 0.75"))
    async with serve as fake, user_of(fake, goal_check="Soup.", chat={"seed": 1}) as user:
        request = await talk(user, "Leeks.")
    assert request.reward_scores["user_turn_rewards"] == [0.75]
    assert len({body["seed"] for body in fake.asked}) == 4


async def test_seeds_are_functions_of_the_request_and_the_call():
    async def seeds(seed: int | None) -> list[Any]:
        serve = serving(in_turn("And?", "###STOP###"))
        async with serve as fake, user_of(fake, chat={"seed": seed}) as user:
            await talk(user, "Hi.", "Yes.")
        return [body.get("seed") for body in fake.asked]

    once = await seeds(3)
    assert once == await seeds(3)
    assert len({*once, *await seeds(4)}) == 4
    assert await seeds(None) == [None, None]


def test_the_roles_alternate_whatever_the_conversation_is():
    def message(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content}

    conversation = [message("system", "s"), message("user", "a"), message("user", "b")]
    conversation += [message("assistant", ""), message("tool", "t"), message("assistant", "c")]
    roles = [m["role"] for m in user_messages(Role("p", "", "!"), conversation, show_tools=False)]
    assert roles == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "chat"),
        ({"chat": {"model": "m", "api_key": KEY}}, "chat.base_url"),
        ({"chat": {"model": "m", "api_key": [KEY], "base_url": "http://x/v1"}}, "chat.api_key"),
        ({"chat": {"model": "m", "apikey": KEY, "base_url": "http://x/v1"}}, "chat.apikey"),
        ({"chat": {"model": "m", "base_url": "http://x/v1"}, "persna": "x"}, "persna"),
    ],
)
def test_a_config_that_means_nothing_is_refused_with_its_key(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as caught:
        UserSimulatorInteraction({"name": "user", **config})
    assert caught.value.details["key"] == key
    assert KEY not in str(caught.value)
