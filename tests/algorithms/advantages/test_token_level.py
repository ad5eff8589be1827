"""."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage, get_adv_estimator_fn
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.protocol import DataProto
from tests.fakes.turn_rows import TurnRows, turn_rows

decays = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def naive_gae(rows: TurnRows, gamma: float, lam: float) -> torch.Tensor:
    """Advantages of the trained tokens, not whitened."""
    found = torch.zeros_like(rows.rewards)
    for row in range(len(rows.index)):
        next_value = next_advantage = 0.0
        for i in reversed(range(rows.mask.shape[1])):
            if rows.mask[row, i]:
                delta = rows.rewards[row, i] + gamma * next_value - rows.values[row, i]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = rows.values[row, i]
                found[row, i] = next_advantage
    return found


def naive_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen = values[mask.bool()].double().tolist()
    if len(set(seen)) < 2:
        return torch.zeros_like(values)
    std = (statistics.variance(seen) + 1e-8) ** 0.5
    return torch.where(mask.bool(), (values - statistics.fmean(seen)) / std, 0.0)


def estimate(name: str, rows: TurnRows, gamma: float, lam: float):
    return get_adv_estimator_fn(name)(rows.rewards, rows.values, rows.mask, gamma, lam)


@settings(deadline=None, max_examples=40)
@given(turn_rows(), decays, decays)
def test_gae_equals_a_naive_loop(rows, gamma, lam):
    advantages, returns = estimate("gae", rows, gamma, lam)
    expected = naive_gae(rows, gamma, lam)
    whitened = naive_whiten(expected, rows.mask)
    torch.testing.assert_close(advantages, whitened, rtol=1e-4, atol=1e-4)
    learned = torch.where(rows.mask.bool(), expected + rows.values, 0.0)
    torch.testing.assert_close(returns, learned, rtol=1e-5, atol=1e-5)


def test_gae_by_hand_over_an_observation():
    rewards, values = torch.tensor([[0.0, 50.0, 1.0]]), torch.tensor([[0.5, 70.0, 0.25]])
    _, returns = get_adv_estimator_fn("gae")(rewards, values, torch.tensor([[1, 0, 1]]), 0.5, 0.5)
    # delta = 0.5 * 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75; A = -0.375 + 0.25 * 0.75 and 0.75.
    torch.testing.assert_close(returns, torch.tensor([[-0.1875 + 0.5, 0.0, 1.0]]))


def test_gae_on_a_long_response_equals_a_loop():
    torch.manual_seed(0)
    mask = torch.rand(2, 4096) < 0.6
    rows = TurnRows(torch.randn(2, 4096), torch.randn(2, 4096), mask, mask, mask, [0, 1], mask)
    _, returns = estimate("gae", rows, 0.99, 0.95)
    expected = torch.where(mask, naive_gae(rows, 0.99, 0.95) + rows.values, 0.0)
    torch.testing.assert_close(returns, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mask", [[[0, 0]], [[0, 1]]])
def test_a_batch_with_nothing_to_compare_trains_on_nothing(mask):
    nothing = torch.full((1, 2), torch.nan)
    rewards = torch.where(torch.tensor(mask) == 1, 3.0, nothing)
    advantages, returns = get_adv_estimator_fn("gae")(rewards, rewards, torch.tensor(mask), 1, 1)
    assert not advantages.any()
    assert returns.tolist() == [[3.0 * bit for bit in mask[0]]]


@settings(deadline=None, max_examples=40)
@given(turn_rows(), decays)
def test_gae_verl_is_the_same_where_tokens_are_trained_and_not_0_elsewhere(rows, gamma):
    if rows.mask.sum() < 2:
        return
    ours, reference = estimate("gae", rows, gamma, 0.5), estimate("gae_verl", rows, gamma, 0.5)
    trained = rows.mask.bool()
    torch.testing.assert_close(reference[1][trained], ours[1][trained])
    if ours[0].any():
        torch.testing.assert_close(reference[0][trained], ours[0][trained], rtol=1e-4, atol=1e-4)


def test_gae_verl_leaves_on_a_tool_token_the_advantage_of_the_next_trained_one():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.5, 0.0]])
    advantages, returns = get_adv_estimator_fn("gae_verl")(
        rewards, values, torch.tensor([[1, 0, 1]]), 0.5, 1.0
    )
    assert advantages[0, 1] == advantages[0, 2] > 0
    assert returns.tolist() == [[0.5, 1.5, 1.0]]


def naive_returns(rows: TurnRows, gamma: float) -> torch.Tensor:
    found = torch.zeros_like(rows.rewards)
    for row in range(len(rows.index)):
        later = 0.0
        for i in reversed(range(rows.mask.shape[1])):
            if rows.mask[row, i]:
                later = rows.rewards[row, i] + gamma * later
                found[row, i] = later
    return found


@settings(deadline=None, max_examples=40)
@given(turn_rows(), st.sampled_from([0.0, 0.5, 1.0]))
def test_reinforce_plus_plus_equals_a_naive_loop(rows, gamma):
    advantages, returns = get_adv_estimator_fn("reinforce_plus_plus")(
        rows.rewards, rows.mask, config=AlgorithmConfig(gamma=gamma)
    )
    expected = naive_returns(rows, gamma)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, naive_whiten(expected, rows.mask), rtol=1e-4, atol=1e-4)


def test_reinforce_plus_plus_by_hand():
    rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = get_adv_estimator_fn("reinforce_plus_plus")(
        rewards, mask, config=AlgorithmConfig(gamma=0.5)
    )
    assert returns.tolist() == [[0.5, 0.0, 1.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0]]) / 2**0.5)


def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero():
    rewards = torch.tensor([[0.0, 0.1], [0.0, 0.1], [0.0, 0.1]])
    advantages, _ = get_adv_estimator_fn("reinforce_plus_plus")(
        rewards, torch.ones(3, 2), config=AlgorithmConfig(gamma=1.0)
    )
    assert not advantages.any()


@settings(deadline=None, max_examples=40)
@given(turn_rows())
def test_remax_equals_a_naive_loop(rows):
    baselines = rows.values[:, 0]
    advantages, returns = get_adv_estimator_fn("remax")(rows.rewards, baselines, rows.mask)
    expected = naive_returns(rows, 1.0)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(
        advantages, torch.where(rows.mask.bool(), expected - baselines[:, None], 0.0)
    )


def test_remax_takes_the_greedy_score_from_the_batch():
    data = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 7.0, 1.0], [0.25, 0.0, 0.0]]),
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
            "reward_baselines": torch.tensor([0.5, 1.0]),
        }
    )
    compute_advantage(data, AlgorithmConfig(adv_estimator="remax"))
    assert data.batch["advantages"].tolist() == [[0.5, 0.0, 0.5], [-0.75, 0.0, 0.0]]
    assert data.batch["returns"].tolist() == [[1.0, 0.0, 1.0], [0.25, 0.0, 0.0]]


def test_remax_verl_leaves_returns_on_tool_tokens():
    rewards, mask = torch.tensor([[0.0, 7.0, 1.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = get_adv_estimator_fn("remax_verl")(rewards, torch.tensor([0.5]), mask)
    assert returns.tolist() == [[1.0, 1.0, 1.0]]
    assert advantages.tolist() == [[0.5, 1.0, 0.5]]
