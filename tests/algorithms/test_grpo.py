import statistics
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import (
    compute_advantage,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from agentrl.config.schema.run import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto
from agentrl.rewards.placement import split_evenly
from tests.fakes.tensors import Rows, ragged_rows


def advantages_of(rows: Rows, **settings) -> torch.Tensor:
    advantages, returns = compute_grpo_outcome_advantage(
        rows.rewards, rows.mask, rows.index, in_baseline=rows.in_baseline, **settings
    )
    assert torch.equal(advantages, returns)
    return advantages


def naive_grpo(rows: Rows, *, divide: bool = True) -> list[float]:
    scores, counted = [], []
    for row in range(len(rows.index)):
        trained = [i for i, mask in enumerate(rows.mask[row].tolist()) if mask]
        scores.append(sum(rows.rewards[row, i].item() for i in trained))
        counted.append(bool(trained) and bool(rows.in_baseline[row]))
    found = []
    for row, uid in enumerate(rows.index):
        group = [s for s, u, c in zip(scores, rows.index, counted, strict=True) if c and u == uid]
        if not counted[row] or max(group) == min(group):
            found.append(0.0)
        else:
            centred = scores[row] - statistics.fmean(group)
            found.append(centred / (statistics.stdev(group) + 1e-6) if divide else centred)
    return found


@settings(deadline=None, max_examples=60)
@given(ragged_rows(quarters=True), st.booleans())
def test_grpo_equals_a_naive_loop(rows, divide):
    found = advantages_of(rows, norm_adv_by_std_in_grpo=divide)
    expected = torch.tensor(naive_grpo(rows, divide=divide))
    expected = expected[:, None] * rows.mask
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_grpo_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["g"] * 3, object))
    expected = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [1.0, 0.0]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-1e4, 1e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-4),
    st.lists(st.integers(1, 300), min_size=1, max_size=17),
    st.booleans(),
    st.booleans(),
)
def test_equal_rewards_equal_rewards_give_exactly_zero(reward, lengths, spread, divide):
    width = max(lengths)
    rewards, mask = torch.zeros(len(lengths), width), torch.zeros(len(lengths), width)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        parts = split_evenly(reward, length) if spread else [0.0] * (length - 1) + [reward]
        rewards[row, :length] = torch.tensor(parts)
    index = np.array(["g"] * len(lengths), dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=divide
    )
    assert not advantages.any()


def test_equal_rewards_seventeen_equal_rewards_of_7_7():
    rewards, index = torch.full((17, 1), 7.7), np.array(["g"] * 17, dtype=object)
    assert rewards.sub(rewards.mean()).any()  # what float64 protects from
    assert not compute_grpo_outcome_advantage(rewards, torch.ones(17, 1), index)[0].any()


def test_equal_rewards_equal_rewards_in_float64_whose_mean_is_not_exact():
    rewards = torch.full((3, 1), 0.1, dtype=torch.float64)
    assert (rewards - rewards.sum() / 3).any()  # what the comparison protects from
    index = np.array(["g"] * 3, dtype=object)
    assert not compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), index)[0].any()


def test_equal_rewards_rewards_that_are_equal_but_for_how_they_were_split():
    rewards, mask = torch.tensor([[0.1, 0.2], [0.0, 0.3]]), torch.ones(2, 2)
    assert len(set(rewards.double().sum(-1).tolist())) == 2  # what the rounding protects from
    assert not compute_grpo_outcome_advantage(rewards, mask, np.array(["g"] * 2, object))[0].any()


def test_equal_rewards_a_group_of_one_trains_on_nothing_and_by_name_on_its_reward():
    rewards, mask, index = torch.tensor([[0.0, 3.0]]), torch.ones(1, 2), np.array(["g"], object)
    assert not compute_grpo_outcome_advantage(rewards, mask, index)[0].any()
    raw, _ = get_adv_estimator_fn("grpo_verl")(rewards, mask, index)
    torch.testing.assert_close(raw, torch.full((1, 2), 3.0))


def test_by_reference_equal_rewards_train_on_their_rounding():
    rewards, index = torch.full((17, 1), 7.7), np.array(["g"] * 17, dtype=object)
    noise, _ = get_adv_estimator_fn("grpo_verl")(rewards, torch.ones(17, 1), index)
    assert noise.abs().max() > 0.1


def test_a_fully_masked_row_is_not_in_its_group_s_mean():
    rewards = torch.tensor([[1.0], [3.0], [100.0]])
    mask, index = torch.tensor([[1], [1], [0]]), np.array(["g"] * 3, dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[-1.0], [1.0], [0.0]]


def test_groups_may_be_given_as_a_tensor():
    rewards, mask = torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, torch.tensor([4, 4, 2]), norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[-1.0], [1.0], [0.0]]


# How a batch is handed to an estimator.


def scored_batch() -> DataProto:
    return DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 9.0]]),
            "response_mask": torch.ones(3, 2, dtype=torch.int64),
            "in_baseline": torch.tensor([True, True, False]),
            "turn_ids": torch.zeros(3, 2, dtype=torch.int64),
        },
        {"uid": ["g"] * 3},
    )


def test_a_batch_gets_advantages_and_returns():
    data = compute_advantage(scored_batch(), AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert data.batch["advantages"].tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    assert torch.equal(data.batch["returns"], data.batch["advantages"])
    assert torch.equal(data.batch["token_level_rewards"], data.batch["token_level_scores"])


def test_rewards_that_differ_from_the_scores_are_used():
    data = scored_batch()
    data.batch["token_level_rewards"] = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    compute_advantage(data, AlgorithmConfig())
    assert not data.batch["advantages"].any()


def test_an_estimator_of_ten_lines_is_given_what_it_names():
    class Mine(Enum):
        RAW = "raw-of-a-test"

    @register_adv_est(Mine.RAW)
    def compute_raw_advantage(token_level_rewards, response_mask, turn_ids, gamma, missing=None):
        assert missing is None
        assert turn_ids.shape == response_mask.shape
        scores = gamma * token_level_rewards.sum(-1, keepdim=True) * response_mask
        return scores, scores

    data = compute_advantage(
        scored_batch(), AlgorithmConfig(adv_estimator="raw-of-a-test", gamma=0.5)
    )
    assert data.batch["advantages"][:, 0].tolist() == [0.5, 1.5, 4.5]


def test_an_estimator_with_open_arguments_is_given_all_there_is():
    @register_adv_est("open-of-a-test")
    def compute_open_advantage(token_level_rewards, response_mask, **told):
        assert {"index", "config", "lam", "non_tensor_batch", "batch"} <= told.keys()
        return token_level_rewards, token_level_rewards

    compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="open-of-a-test"))


def test_an_estimator_that_wants_what_is_not_there_is_told():
    @register_adv_est("values-of-a-test")
    def compute_value_advantage(token_level_rewards, values):
        return values, values

    with pytest.raises(ConfigError, match="needs 'values', which the batch does not have"):
        compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="values-of-a-test"))


def test_an_estimator_that_returns_another_shape_is_told():
    @register_adv_est("flat-of-a-test")
    def compute_flat_advantage(token_level_rewards):
        return token_level_rewards.sum(-1), token_level_rewards

    with pytest.raises(ConfigError, match=r"advantages of shape \(3,\)"):
        compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="flat-of-a-test"))


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grppo")
    with pytest.raises(ConfigError, match="already"):
        register_adv_est("grpo")(lambda: None)
