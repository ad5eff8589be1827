import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema import RewardWeightsConfig
from agentrl.rewards.placement import PlacedReward, place_rewards, split_evenly
from agentrl.rollout.states import StopReason
from tests.fakes_requests import build_request, finished_requests, observed, said

ALL = RewardWeightsConfig(trajectory=1.0, turn=1.0, tool=1.0)
weights = st.builds(
    RewardWeightsConfig,
    trajectory=st.floats(0, 2, width=32),
    turn=st.floats(0, 2, width=32),
    tool=st.floats(0, 2, width=32),
)
placements = st.sampled_from(["last", "spread"])


@settings(deadline=None, max_examples=60)
@given(finished_requests(), weights, placements)
def test_law_7_rewards_land_on_trained_tokens_and_sum_to_the_combined(request_, weights, placement):
    placed = place_rewards(request_, weights, placement)
    trained = {i for i, mask in enumerate(request_.loss_mask) if mask and request_.is_trained}
    assert {reward.position for reward in placed.rewards} <= trained
    if not trained:
        assert placed.index is None
        assert placed.rewards == ()
        return
    assert placed.index == max(trained)
    size = sum(abs(reward.value) for reward in placed.rewards)
    total = math.fsum(reward.value for reward in placed.rewards)
    assert total == pytest.approx(placed.combined, rel=1e-6, abs=1e-6 * size + 1e-12)


@settings(deadline=None, max_examples=60)
@given(finished_requests(), weights)
def test_law_7_the_trajectory_s_reward_is_on_the_last_trained_token(request_, weights):
    placed = place_rewards(request_, weights.model_copy(update={"turn": 0.0}))
    assert [reward.position for reward in placed.rewards if reward.value] in ([], [placed.index])


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-1e6, 1e6, width=32).filter(lambda total: total == 0 or abs(total) > 1e-6),
    st.integers(1, 5000),
)
def test_law_9_equal_rewards_stay_equal_however_long_the_response(total, count):
    parts = split_evenly(total, count)
    assert [float(np.float32(part)) for part in parts] == parts
    assert math.fsum(parts) == total
    assert max(parts) - min(parts) <= abs(total) / count * 0.01 + 1e-12


def test_by_default_the_trajectory_alone_counts():
    request = build_request(
        said(2, reward=5.0), observed(1), said(2), reward=1.0, tool_rewards={"x": 7.0}
    )
    placed = place_rewards(request)
    assert placed.combined == 1.0
    assert placed.rewards == (PlacedReward(4, 1.0),)


def test_each_reward_lands_on_its_own_turn():
    request = build_request(
        said(2, reward=0.75, call_rewards=(0.5, 0.25)),  # the runner sums the calls into the turn
        observed(3),
        said(2, reward=-1.0),
        observed(1),
        reward=2.0,
        tool_rewards={"x": 4.0},
    )
    placed = place_rewards(request, ALL)
    assert placed.rewards == (PlacedReward(1, 0.75), PlacedReward(6, 5.0))
    assert placed.index == 6
    assert placed.moved_turns == ()


def test_spread_rewards_stay_on_their_turns():
    request = build_request(said(2, reward=1.0), observed(3), said(2), reward=2.0)
    placed = place_rewards(request, ALL, "spread")
    assert placed.rewards == (
        PlacedReward(0, 1.0), PlacedReward(1, 1.0), PlacedReward(5, 0.5), PlacedReward(6, 0.5),
    )  # fmt: skip


def test_a_trajectory_that_ends_on_an_observation_is_rewarded_before_it():
    request = build_request(said(2), observed(3), stop_reason=StopReason.RESPONSE_BUDGET, reward=1)
    assert place_rewards(request).rewards == (PlacedReward(1, 1.0),)


def test_an_excluded_turn_gives_its_reward_to_the_token_before_it():
    request = build_request(said(2), observed(1), said(2, reward=3.0, excluded=True), said(1))
    placed = place_rewards(request, ALL)
    assert PlacedReward(1, 3.0) in placed.rewards
    assert placed.moved_turns == (2,)


def test_an_excluded_first_turn_gives_its_reward_to_the_first_trained_token():
    request = build_request(said(2, reward=3.0, excluded=True), said(2))
    assert place_rewards(request, ALL).rewards == (PlacedReward(2, 3.0), PlacedReward(3, 0.0))


def test_a_request_without_trained_tokens_places_nothing_and_says_so():
    request = build_request(said(2, excluded=True), reward=1.0)
    placed = place_rewards(request)
    assert (placed.combined, placed.rewards, placed.index) == (1.0, (), None)


def test_a_dropped_request_places_nothing():
    request = build_request(said(2), reward=1.0)
    request.dropped = "a sample of its group failed"
    assert place_rewards(request).index is None
