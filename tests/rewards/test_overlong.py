"""Soft punishment of long answers: the formula of the paper on numbers worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema.reward import OverlongBufferConfig, RewardConfig
from agentrl.rewards.combination import combine_rewards, compute_overlong_reward, record_shaping
from agentrl.rollout.records import Budgets
from tests.fakes.requests import build_request, observed, said

PAPER = OverlongBufferConfig(enable=True, len=4096)
BUFFER = RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=5))
BUDGETS = Budgets(max_response_tokens=15)


@pytest.mark.parametrize(
    ("num_tokens", "reward"),
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (25000, -1.0),
    ],
)
def test_values_of_the_paper_s_setting(num_tokens: int, reward: float):
    assert compute_overlong_reward(num_tokens, 20480, PAPER) == reward


@settings(max_examples=40)
@given(st.integers(0, 300), st.integers(1, 200), st.floats(0, 5))
def test_reward_is_that_of_the_three_cases(num_tokens: int, length: int, factor: float):
    buffer = OverlongBufferConfig(enable=True, len=length, penalty_factor=factor)
    found = compute_overlong_reward(num_tokens, 200, buffer)
    if num_tokens <= 200 - length:
        expected = 0.0
    elif num_tokens <= 200:
        expected = factor * ((200 - length) - num_tokens) / length
    else:
        expected = -factor
    assert found == pytest.approx(expected, abs=1e-12)


def test_observations_are_invisible_tokens_that_the_policy_was_shown_do_not_count():
    plain = build_request(said(6), said(6), reward=1.0, budgets=BUDGETS)
    shown = build_request(said(6), observed(2), said(6), observed(1), reward=1.0, budgets=BUDGETS)
    for request in (plain, shown):
        assert combine_rewards(request, BUFFER).total == pytest.approx(1 - 2 / 5)
        record_shaping(request, BUFFER)
        assert request.reward == 1.0
        assert request.reward_extra_info == {"overlong_reward": -2 / 5}


def test_tokens_of_an_excluded_turn_count():
    request = build_request(said(6, excluded=True), said(6), reward=1.0, budgets=BUDGETS)
    assert combine_rewards(request, BUFFER).total == pytest.approx(0.6)


def test_extra_values_of_the_scorer_are_kept():
    request = build_request(said(2), reward=1.0, reward_extra_info={"acc": 1.0}, budgets=BUDGETS)
    record_shaping(request, BUFFER)
    assert request.reward_extra_info == {"acc": 1.0, "overlong_reward": 0.0}
