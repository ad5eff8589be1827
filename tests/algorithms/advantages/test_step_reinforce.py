import statistics

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import get_adv_estimator_fn
from tests.fakes.turn_rows import TurnRows, turn_rows


def naive_step_reinforce(rows: TurnRows, gamma: float, *, divide: bool) -> torch.Tensor:
    found = []
    for row in range(len(rows.index)):
        group = rows.group(row)
        returns = [value for r in group for value in rows.returns_to_go(r, gamma)]
        own = rows.returns_to_go(row, gamma)
        if row not in group or max(returns) == min(returns):
            found.append([0.0] * len(own))
            continue
        scale = statistics.stdev(returns) + 1e-6 if divide else 1.0
        found.append([(value - statistics.fmean(returns)) / scale for value in own])
    return rows.by_token(found)


@settings(deadline=None, max_examples=40)
@given(turn_rows(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_step_reinforce_equals_a_naive_loop(rows, gamma, divide):
    advantages, returns = get_adv_estimator_fn("step_reinforce")(
        rows.rewards, rows.mask, rows.turn_ids, rows.index, gamma,
        norm_adv_by_std_in_grpo=divide, in_baseline=rows.in_baseline,
    )  # fmt: skip
    expected = naive_step_reinforce(rows, gamma, divide=divide)
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    earned = [rows.returns_to_go(row, gamma) for row in range(len(rows.index))]
    torch.testing.assert_close(returns, rows.by_token(earned))


def test_step_reinforce_by_hand():
    """Two turns that return 1 and 2, and one that returns 0: their mean is 1."""
    rewards = torch.tensor([[0.0, 9.0, 2.0], [0.0, 0.0, 0.0]])
    mask, turn_ids = torch.tensor([[1, 0, 1], [1, 0, 0]]), torch.tensor([[0, 1, 2], [0, -1, -1]])
    advantages, _ = get_adv_estimator_fn("step_reinforce")(
        rewards, mask, turn_ids, np.array(["g", "g"], object), 0.5, norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]


def test_with_a_discount_equal_outcomes_differ_by_how_far_off_they_were():
    rewards, turn_ids = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0, -1], [0, 1]])
    advantages, _ = get_adv_estimator_fn("step_reinforce")(
        rewards, (turn_ids >= 0).long(), turn_ids, np.array(["g", "g"], object), 0.7,
        norm_adv_by_std_in_grpo=False,
    )  # fmt: skip
    torch.testing.assert_close(advantages, torch.tensor([[0.1, 0.0], [-0.2, 0.1]]))


def test_equal_rewards_equal_outcomes_give_exactly_zero_however_many_turns_they_took():
    rewards = torch.tensor([[0.0, 0.0, 0.3], [0.3, 0.0, 0.0], [0.0, 0.1, 0.2]])
    mask, turn_ids = torch.ones(3, 3), torch.tensor([[0, 1, 2], [0, 0, 0], [0, 1, 1]])
    advantages, _ = get_adv_estimator_fn("step_reinforce")(
        rewards, mask, turn_ids, np.array(["g"] * 3, object)
    )
    assert not advantages.any()
