"""The one rule by which rewards become one, and what it leaves alone."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema.reward import (
    OverlongBufferConfig,
    RewardConfig,
    RewardModelConfig,
    RewardWeightsConfig,
)
from agentrl.rewards.combination import (
    RewardPart,
    Source,
    active_sources,
    combine_rewards,
    record_shaping,
)
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.requests import build_request, finished_requests, observed, said

BUDGETS = Budgets(max_response_tokens=20)


def story(*, reward: float | None = 1.0, **fields: Any) -> AsyncRolloutRequest:
    """Two calls, an answer that the interaction scored; 8 sampled tokens of 20."""
    return build_request(
        said(4, reward=0.75, call_rewards=(0.5, 0.25)),
        observed(5),
        said(3, reward=-2.0),
        observed(1),
        said(1),
        reward=reward,
        tool_rewards={"x": 3.0, "y": 4.0},
        budgets=BUDGETS,
        **fields,
    )


def parts_of(request: AsyncRolloutRequest, **keys: Any) -> dict[Source, float]:
    reward = combine_rewards(request, RewardConfig.model_validate(keys))
    return {source: reward.of(source) for source in Source if reward.of(source)}


def test_by_default_the_scorer_s_number_alone_counts():
    assert parts_of(story()) == {Source.TRAJECTORY: 1.0}


@pytest.mark.parametrize(
    ("weight", "source", "value"),
    [("trajectory", Source.TRAJECTORY, 2.0), ("interaction", Source.INTERACTION, -4.0),
     ("tool_call", Source.TOOL_CALL, 1.5), ("tool", Source.TOOL, 14.0)],
)  # fmt: skip
def test_each_source_has_its_own_weight(weight: str, source: Source, value: float):
    weights = {"trajectory": 0, weight: 2.0}
    assert parts_of(story(), weights=weights) == {source: value}


def test_the_score_of_the_reward_model_has_its_weight_and_is_recorded_without_it():
    request, keys = story(rm_score=3.0), {"model": {"path": "model", "weight": 0.5}}
    assert parts_of(request, **keys) == {Source.TRAJECTORY: 1.0, Source.REWARD_MODEL: 1.5}
    assert parts_of(story(), **keys) == {Source.TRAJECTORY: 1.0}
    assert parts_of(request) == {Source.TRAJECTORY: 1.0}
    record_shaping(request, RewardConfig.model_validate(keys))
    assert request.reward_extra_info == {"reward_model": 3.0}


def test_a_turn_s_reward_is_of_its_calls_or_of_the_interaction_and_never_of_both():
    config = RewardConfig(weights=RewardWeightsConfig(trajectory=0, interaction=1, tool_call=1))
    found = combine_rewards(story(), config).parts
    assert [(p.source, p.turn and p.turn.index, p.value) for p in found] == [
        (Source.TOOL_CALL, 0, 0.5), (Source.TOOL_CALL, 0, 0.25), (Source.INTERACTION, 2, -2.0),
    ]  # fmt: skip


def test_a_bonus_is_for_calls_that_were_answered_up_to_a_number():
    request = story()
    assert parts_of(request, tool_call_bonus=0.1)[Source.TOOL_CALL_BONUS] == 0.1
    assert parts_of(request, tool_call_bonus=0.1, max_bonus_calls=5)[
        Source.TOOL_CALL_BONUS
    ] == pytest.approx(0.2)
    for call in request.turns[0].calls:
        call.outcome = "tool_error"
    assert Source.TOOL_CALL_BONUS not in parts_of(request, tool_call_bonus=0.1)


def test_a_bonus_is_on_the_first_answered_call():
    request = story()
    request.turns[0].calls[0].outcome = "malformed"
    [_, bonus] = combine_rewards(request, RewardConfig(tool_call_bonus=0.1)).parts
    assert bonus == RewardPart(
        Source.TOOL_CALL_BONUS, 0.1, request.turns[0], request.turns[0].calls[1]
    )


def test_an_interaction_s_bonus_is_for_a_conversation_that_it_ended_itself():
    ended = story(stop_reason=StopReason.INTERACTION_ENDED)
    [_, bonus] = combine_rewards(ended, RewardConfig(interaction_bonus=0.5)).parts
    assert bonus == RewardPart(Source.INTERACTION_BONUS, 0.5, ended.turns[4])
    for reason in (StopReason.ANSWERED, StopReason.MAX_USER_TURNS):
        assert parts_of(story(stop_reason=reason), interaction_bonus=0.5) == {
            Source.TRAJECTORY: 1.0
        }


def test_no_bonus_is_paid_where_the_interaction_s_own_budget_ended_the_conversation():
    ended = story(stop_reason=StopReason.INTERACTION_ENDED)
    ended.turns[-1].metadata["ended_by"] = "user"
    assert Source.INTERACTION_BONUS in parts_of(ended, interaction_bonus=0.5)
    ended.turns[-1].metadata["ended_by"] = "budget"
    assert Source.INTERACTION_BONUS not in parts_of(ended, interaction_bonus=0.5)


def test_the_length_penalty_is_a_share_of_the_sampled_tokens():
    assert parts_of(story(), length_penalty=0.5)[Source.LENGTH_PENALTY] == -0.5 * 8 / 20


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=3))
def test_observations_are_invisible_observed_tokens_cost_nothing(shown: list[int]):
    plain = build_request(*(said(2) for _ in shown), budgets=BUDGETS)
    longer = build_request(
        *(plan for number in shown for plan in (said(2), observed(number))), budgets=BUDGETS
    )
    assert parts_of(plain, length_penalty=1.0) == parts_of(longer, length_penalty=1.0)


def test_no_weight_multiplies_a_bonus_and_the_trajectory_s_multiplies_the_overlong_punishment():
    config = {
        "weights": {"trajectory": 0.5},
        "length_penalty": 1.0,
        "overlong_buffer": {"enable": True, "len": 20, "penalty_factor": 2.0},
    }
    assert parts_of(story(), **config) == {
        Source.TRAJECTORY: 0.5, Source.OVERLONG: -0.5 * 2 * 8 / 20, Source.LENGTH_PENALTY: -8 / 20,
    }  # fmt: skip


def test_unscored_requests_get_no_overlong_penalty():
    buffer = {"enable": True, "len": 20}
    assert parts_of(story(reward=None), overlong_buffer=buffer) == {}


EVERYTHING = RewardConfig(
    weights=RewardWeightsConfig(trajectory=1, interaction=1, tool_call=1, tool=1),
    tool_call_bonus=0.1,
    interaction_bonus=0.2,
    length_penalty=0.3,
    overlong_buffer=OverlongBufferConfig(enable=True, len=20),
    model=RewardModelConfig(path="model"),
)


@settings(deadline=None, max_examples=60)
@given(finished_requests())
def test_combining_and_recording_change_no_number_that_was_scored(request_: AsyncRolloutRequest):
    """Validation reads `reward`, `success` and `acc`: bonuses never touch them."""
    request_.reward_extra_info = {"acc": 1.0, "success": 0.0}
    before = request_.model_copy(deep=True)
    total = combine_rewards(request_, EVERYTHING).total
    record_shaping(request_, EVERYTHING)
    record_shaping(request_, EVERYTHING)
    assert combine_rewards(request_, EVERYTHING).total == total
    kept = {key: request_.reward_extra_info.pop(key) for key in ("acc", "success")}
    assert kept == before.reward_extra_info
    recorded = {*request_.reward_extra_info}
    request_.reward_extra_info = before.reward_extra_info
    assert request_ == before
    names = {"overlong_reward", "tool_call_bonus", "interaction_bonus", "length_penalty"}
    assert recorded == (set() if request_.reward is None else names)


def test_only_what_is_asked_for_is_recorded():
    request = story()
    record_shaping(request, RewardConfig(length_penalty=0.5))
    assert request.reward_extra_info == {"length_penalty": -0.2}
    assert active_sources(RewardConfig()) == []
    assert set(active_sources(EVERYTHING)) == set(Source) - {Source.TRAJECTORY}
