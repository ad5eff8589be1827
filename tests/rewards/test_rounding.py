"""Parts of a reward: each a float32, their sum is the reward to the last bit."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rewards.placement import distribute_exactly, split, split_evenly

totals = st.floats(-1e6, 1e6, width=32).filter(lambda total: total == 0 or abs(total) > 1e-6)


def is_float32(parts: list[float]) -> bool:
    return [float(np.float32(part)) for part in parts] == parts


@settings(deadline=None, max_examples=60)
@given(totals, st.integers(1, 5000))
def test_equal_rewards_equal_rewards_stay_equal_however_long_the_response(total: float, count: int):
    parts = split_evenly(total, count)
    assert is_float32(parts)
    assert math.fsum(parts) == total
    assert max(parts) - min(parts) <= abs(total) / count * 0.01 + 1e-12


@settings(deadline=None, max_examples=60)
@given(totals, st.integers(1, 2000), st.floats(0, 1))
def test_equal_rewards_unequal_shares_sum_to_the_reward_too(total: float, count: int, decay: float):
    falling = [decay**back for back in reversed(range(count))]
    total_share = sum(falling)
    shares = [share / total_share for share in falling]
    parts = split(total, shares)
    assert is_float32(parts)
    assert math.fsum(parts) == total
    assert all(
        abs(part - total * share) <= abs(total) * shares[-1] * 0.01
        for part, share in zip(parts, shares, strict=True)
    )


def test_a_negated_reward_is_cut_into_negated_parts():
    assert split_evenly(-0.7, 7) == [-part for part in split_evenly(0.7, 7)]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_equal_rewards_settled_rewards_sum_to_the_total_while_a_token_is_spare(values: list[float]):
    placed = dict(enumerate(values))
    total = math.fsum(values)
    settled = distribute_exactly(placed, total, spare=range(len(values) + 1))
    assert np.float32(math.fsum(settled.values())) == np.float32(total)
    assert is_float32(list(settled.values()))
    for token, value in placed.items():
        assert abs(settled[token] - value) <= 1e-6 * max(map(abs, values)) + 1e-12


def test_a_reward_and_a_penalty_that_cancel_leave_what_one_number_would_be():
    settled = distribute_exactly({3: -1.0, 7: 0.9}, -1.0 + 0.9, spare=[3, 6, 7])
    assert np.float32(math.fsum(settled.values())) == np.float32(-0.1)
    assert abs(settled[6]) < 1e-7
    assert distribute_exactly({3: 0.25, 7: 0.5}, 0.75, spare=[3, 6, 7]) == {3: 0.25, 7: 0.5}
