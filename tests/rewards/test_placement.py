"""Rewards are on trained tokens, and every placement has the same sum."""

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema.reward import Placement, RewardConfig, RewardWeightsConfig
from agentrl.rewards.combination import combine_rewards
from agentrl.rewards.placement import PlacedReward, RewardPlacement, place_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.requests import build_request, finished_requests, observed, said, weighted

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
every = pytest.mark.parametrize("placement", PLACEMENTS)
sizes = st.floats(0, 2, width=32)
configs = st.builds(
    RewardConfig,
    weights=st.builds(
        RewardWeightsConfig, trajectory=sizes, interaction=sizes, tool_call=sizes, tool=sizes
    ),
    tool_call_bonus=sizes,
    max_bonus_calls=st.integers(1, 3),
    interaction_bonus=sizes,
    length_penalty=sizes,
    placement=st.sampled_from(PLACEMENTS),
    placement_decay=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
)
many = settings(deadline=None, max_examples=80)


def trained_tokens(request: AsyncRolloutRequest) -> set[int]:
    return {i for i, mask in enumerate(request.loss_mask) if mask and request.is_trained}


def values(placed: RewardPlacement, length: int) -> list[float]:
    found = dict(placed.rewards)
    return [found.get(place, 0.0) for place in range(length)]


def placed_on(request: AsyncRolloutRequest, placement: Placement, **keys: Any) -> list[float]:
    config = weighted(1.0, tool=1.0, placement=placement, **keys)
    return values(place_rewards(request, config), request.num_response_tokens)


# Invariants.


@many
@given(finished_requests(), configs)
def test_rewards_are_on_trained_tokens_and_sum_to_the_combined_reward(request_, config):
    placed = place_rewards(request_, config)
    trained = trained_tokens(request_)
    assert {reward.position for reward in placed.rewards} <= trained
    assert placed.combined == combine_rewards(request_, config).total
    if not trained:
        assert placed.index is None
        assert placed.rewards == ()
        return
    assert placed.index in {reward.position for reward in placed.rewards}
    assert all(np.float32(reward.value) == reward.value for reward in placed.rewards)
    total = math.fsum(reward.value for reward in placed.rewards)
    largest = max(abs(reward.value) for reward in placed.rewards)
    assert total == pytest.approx(placed.combined, rel=1e-6, abs=3e-7 * largest + 1e-12)


@many
@given(finished_requests(), configs)
def test_rewards_on_trained_tokens_the_sum_is_the_same_to_the_last_bit_in_every_placement(
    request_, config
):
    """As far as there is a token left for what a cancellation leaves: here three more."""
    request = build_request(
        *(said(t.num_tokens, reward=t.reward, excluded=bool(t.excluded)) for t in request_.turns),
        said(3),
        reward=request_.reward,
        stop_reason=StopReason.ANSWERED,
    )
    for placement in PLACEMENTS:
        placed = place_rewards(request, config.model_copy(update={"placement": placement}))
        total = math.fsum(reward.value for reward in placed.rewards)
        assert np.float32(total) == np.float32(placed.combined)


@many
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.floats(-9, 9, width=32), configs)
def test_equal_rewards_equal_rewards_are_equal_however_many_tokens_they_lie_on(
    lengths, reward, config
):
    alone = config.model_copy(update={"length_penalty": 0.0})
    sums = set[np.float32]()
    for count in (1, len(lengths)):
        request = build_request(*map(said, lengths[:count]), reward=reward)
        placed = place_rewards(request, alone)
        sums.add(np.float32(math.fsum(one.value for one in placed.rewards)))
    assert len(sums) == 1


@many
@given(st.lists(st.tuples(st.integers(1, 5), sizes), min_size=1, max_size=4), configs)
def test_observations_are_invisible_what_the_policy_was_shown_moves_no_reward(turns, config):
    plans = [said(tokens, reward=reward) for tokens, reward in turns]
    shown = [plan for turn in plans for plan in (turn, observed(3))]
    plain, longer = (build_request(*which, reward=1.0) for which in (plans, shown))
    rewards = [
        [value for value, mask in zip(values(place_rewards(r, config), r.num_response_tokens),
                                      r.loss_mask, strict=True) if mask]
        for r in (plain, longer)
    ]  # fmt: skip
    assert rewards[0] == rewards[1]


@settings(deadline=None, max_examples=60)
@given(finished_requests(), configs)
def test_rewards_on_trained_tokens_the_trajectory_s_reward_is_on_the_last_trained_token(
    request_, config
):
    weights = config.weights.model_copy(update={"interaction": 0.0, "tool_call": 0.0})
    changed = {"weights": weights, "tool_call_bonus": 0.0, "interaction_bonus": 0.0}
    placed = place_rewards(
        request_, config.model_copy(update=changed | {"placement": "last_token"})
    )
    assert [reward.position for reward in placed.rewards if reward.value] in ([], [placed.index])
    assert placed.index == max(trained_tokens(request_), default=None)


# Each placement, by hand.


def story(**fields: Any) -> AsyncRolloutRequest:
    """Two calls in a turn of four tokens, a turn that the interaction heard, an answer."""
    return build_request(
        said(4, call_rewards=(0.5, 0.25), call_spans=((0, 2), (2, 3))),
        observed(2),
        said(2, reward=-1.0),
        observed(1),
        said(2),
        reward=4.0,
        tool_rewards={"x": 2.0},
        **fields,
    )


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("last_token", [0, 0, 0, 0.75, 0, 0, 0, -1, 0, 0, 6]),
        ("turn_last_token", [0, 0, 0, 2 + 0.75, 0, 0, 0, 2 - 1, 0, 0, 2]),
        ("uniform", [*[0.75 + 0.1875] * 4, 0, 0, *[0.75 - 0.5] * 2, 0, 0.75, 0.75]),
        ("tool_call_tokens", [2 + 0.25, 2 + 0.25, 2 + 0.25, 0, 0, 0, 0, -1, 0, 0, 0]),
    ],
)
def test_each_placement_by_hand(placement: Placement, expected: list[float]):
    assert placed_on(story(), placement) == pytest.approx(expected, abs=1e-6)


def test_a_decay_halves_each_token_s_share_backwards_over_trained_tokens():
    request = build_request(said(1), observed(2), said(2), reward=7.0)
    found = placed_on(request, "exponential_decay", placement_decay=0.5)
    assert found == pytest.approx([1, 0, 0, 2, 4])


def test_the_ends_of_a_decay_are_two_other_placements():
    request = story()
    assert placed_on(request, "exponential_decay", placement_decay=0.0) == placed_on(
        request, "last_token"
    )
    assert placed_on(request, "exponential_decay", placement_decay=1.0) == placed_on(
        request, "uniform"
    )


def test_a_call_without_known_tokens_is_its_whole_turn():
    request = build_request(said(2, call_rewards=(1.0,)), observed(1), said(1), reward=1.0)
    assert placed_on(request, "tool_call_tokens") == [1.0, 1.0, 0.0, 0.0]


def test_a_trajectory_without_calls_is_rewarded_on_its_last_token():
    request = build_request(said(2), said(2), reward=1.0)
    assert placed_on(request, "tool_call_tokens") == [0, 0, 0, 1]


def test_calls_of_an_excluded_turn_leave_the_reward_to_the_others():
    request = build_request(
        said(2, call_spans=((0, 2),), excluded=True),
        said(2, call_spans=((1, 2),)),
        said(1),
        reward=1.0,
    )
    assert placed_on(request, "tool_call_tokens") == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("placement", "index"),
    [("last_token", 10), ("turn_last_token", 10), ("uniform", 10), ("exponential_decay", 10),
     ("tool_call_tokens", 2)],
)  # fmt: skip
def test_rewards_on_trained_tokens_where_the_trajectory_s_reward_is_attached_is_recorded(
    placement, index
):
    assert place_rewards(story(), weighted(1.0, placement=placement)).index == index


def test_by_default_the_trajectory_alone_counts():
    placed = place_rewards(story())
    assert placed.combined == 4.0
    assert placed.rewards == (PlacedReward(10, 4.0),)


def test_the_page_names_every_placement_and_every_key():
    page = (Path(__file__).parents[2] / "docs/reward_placement.md").read_text(encoding="utf-8")
    weights = [f"weights.{source}" for source in RewardWeightsConfig.model_fields]
    fields = list(RewardConfig.model_fields)
    keys = fields[fields.index("weights") + 1 :]
    assert all(f"`{name}`" in page for name in (*PLACEMENTS, *weights, *keys[:-2]))
    assert keys[-2:] == ["placement", "placement_decay"]
    assert "`placement_decay`" in page


# What is not trained.


def test_a_trajectory_that_ends_on_an_observation_is_rewarded_before_it():
    request = build_request(said(2), observed(3), stop_reason=StopReason.RESPONSE_BUDGET, reward=1)
    assert place_rewards(request).rewards == (PlacedReward(1, 1.0),)


@every
def test_an_excluded_turn_gives_its_reward_to_the_token_before_it(placement: Placement):
    request = build_request(said(2), observed(1), said(2, reward=3.0, excluded=True), said(1))
    placed = place_rewards(request, weighted(1.0, placement=placement))
    assert PlacedReward(1, 3.0) in placed.rewards
    assert placed.moved_turns == (2,)


@every
def test_an_excluded_first_turn_gives_its_reward_to_the_first_trained_token(placement: Placement):
    request = build_request(said(2, reward=3.0, excluded=True), said(2))
    placed = place_rewards(request, weighted(1.0, placement=placement))
    assert placed.rewards == (PlacedReward(2, 3.0), PlacedReward(3, 0.0))


@every
def test_a_request_without_trained_tokens_places_nothing_and_says_so(placement: Placement):
    request = build_request(said(2, excluded=True), reward=1.0)
    placed = place_rewards(request, RewardConfig(placement=placement))
    assert (placed.combined, placed.rewards, placed.index) == (1.0, (), None)


def test_a_dropped_request_places_nothing():
    request = build_request(said(2), reward=1.0)
    request.dropped = "a sample of its group failed"
    assert place_rewards(request).index is None
