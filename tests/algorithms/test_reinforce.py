import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage, get_adv_estimator_fn
from agentrl.config.schema.run import AlgorithmConfig
from agentrl.protocol import DataProto
from tests.algorithms.test_gae import naive_whiten
from tests.fakes.turns import TurnRows, turn_rows


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
