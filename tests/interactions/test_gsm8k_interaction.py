"""The user of GSM8K: hints, graded scores, encouragement."""

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.interactions import InteractionResult
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction
from agentrl.interactions.session import InteractionSession
from agentrl.messages import Message


async def talk(
    config: dict[str, Any], *answers: str, truth: Any = "42", **row: Any
) -> list[InteractionResult]:
    """What the user replies to one answer after the other."""
    user = Gsm8kInteraction(config)
    session = InteractionSession(
        user, instance_id="r", kwargs=row, offered={"ground_truth": truth, "uid": "g"}
    )
    await session.start()
    messages, replies = [Message(role="user", content="6 * 7?")], []
    for answer in answers:
        messages.append(Message(role="assistant", content=answer))
        replies.append(await session.respond(messages))
        messages.append(Message(role="user", content=replies[-1].content))
    await session.finalize()
    return replies


def hints_of(replies: list[InteractionResult]) -> list[str]:
    """What is told beside the verdict."""
    return [reply.content.partition("on the last line.")[2].strip() for reply in replies]


async def test_hints_are_given_one_by_one_and_the_last_repeats():
    config = {"max_hints": 3, "hints": ["a", "b"]}
    replies = await talk(config, "#### 1", "#### 2", "#### 3", "#### 4")
    assert hints_of(replies) == ["Hint: a", "Hint: b", "Hint: b", ""]
    assert [reply.should_terminate for reply in replies] == [False, False, False, True]


async def test_hints_of_the_row_replace_those_of_the_config():
    assert hints_of(await talk({"hints": ["a"]}, "1", "2", hints=["x", "y"])) == [
        "Hint: x",
        "Hint: y",
    ]
    assert hints_of(await talk({"hints": ["a"]}, "1", hints="x")) == ["Hint: x"]


@pytest.mark.parametrize(
    ("answer", "score"), [("#### 42", 1.0), ("#### 41", 0.2), ("I do not know.", 0.0)]
)
async def test_scores_are_graded(answer: str, score: float):
    assert (await talk({"format_score": 0.2}, answer))[0].score == score


async def test_what_the_strict_method_cannot_read_has_no_right_form():
    replies = await talk({"format_score": 0.2, "method": "strict"}, "It is 42.", "#### 41")
    assert [reply.score for reply in replies] == [0.0, 0.2]


async def test_each_reply_before_the_right_answer_costs_and_never_below_the_form():
    config = {"max_hints": None, "hint_penalty": 0.3, "format_score": 0.25}
    for num_wrong, score in enumerate([1.0, 0.7, 0.4, 0.25, 0.25]):
        replies = await talk(config, *["#### 1"] * num_wrong, "#### 42")
        assert replies[-1].score == pytest.approx(score)
        assert replies[-1].should_terminate


async def test_encouragement_says_what_is_better():
    answers = ["Hm.", "#### 10", "#### 40", "#### 40.0", "#### 99"]
    replies = await talk({"max_hints": None, "encourage": True, "hints": ["h"]}, *answers)
    assert hints_of(replies) == [
        "Hint: h",
        "The form of your answer is right now. Hint: h",
        "That is closer than before. Hint: h",
        "That is the answer that you gave before. Hint: h",
        "Hint: h",
    ]


async def test_without_encouragement_the_reply_is_ever_the_same():
    replies = await talk({}, "#### 10", "#### 40")
    assert replies[0].content == replies[1].content
    assert hints_of(replies) == ["", ""]


@pytest.mark.parametrize("truth", ["one half", "#### 42", "nan", float("nan"), "", []])
async def test_a_truth_that_is_no_number_is_refused(truth: Any):
    with pytest.raises(Exception, match="the ground truth is"):
        await talk({"encourage": True}, "#### 1", truth=truth)


async def test_the_rows_own_truth_goes_before_that_of_its_reward_model():
    assert (await talk({}, "#### 7", truth="42", ground_truth="7"))[0].score == 1.0


async def test_a_row_without_a_right_answer_is_no_row_for_it():
    with pytest.raises(Exception, match=r"expected interaction_kwargs\.ground_truth or"):
        await talk({}, truth=None)


@pytest.mark.parametrize("config", [{"max_hints": -1}, {"hint": ["a"]}])
def test_a_config_that_means_nothing_is_refused(config: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        Gsm8kInteraction(config)
    assert caught.value.details["key"] == next(iter(config))
