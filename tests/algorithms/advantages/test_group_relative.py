"""."""

import itertools
import math
import re
import statistics
from enum import Enum
from pathlib import Path

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
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto
from agentrl.rewards.placement import split_evenly
from tests.fakes.group_rows import (
    SCORES,
    Member,
    advantages_of,
    assert_rows,
    by_row,
    hand_made,
    mean_of,
    members,
    naive,
    naive_whitened,
    std_of,
)
from tests.fakes.tensors import Rows, ragged_rows


def grpo_advantages(rows: Rows, **settings) -> torch.Tensor:
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
    found = grpo_advantages(rows, norm_adv_by_std_in_grpo=divide)
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
    def compute_open_advantage(token_level_rewards, response_mask, **arguments):
        assert {"index", "config", "lam", "non_tensor_batch", "batch"} <= arguments.keys()
        return token_level_rewards, token_level_rewards

    compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="open-of-a-test"))


def test_estimator_with_a_missing_input_is_reported():
    @register_adv_est("values-of-a-test")
    def compute_value_advantage(token_level_rewards, values):
        return values, values

    with pytest.raises(ConfigError, match="needs 'values', which the batch does not have"):
        compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="values-of-a-test"))


def test_estimator_that_returns_a_wrong_shape_is_reported():
    @register_adv_est("flat-of-a-test")
    def compute_flat_advantage(token_level_rewards):
        return token_level_rewards.sum(-1), token_level_rewards

    with pytest.raises(ConfigError, match=r"advantages of shape \(3,\)"):
        compute_advantage(scored_batch(), AlgorithmConfig(adv_estimator="flat-of-a-test"))


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grppo")


def rloo(member: Member, group: list[Member]) -> float:
    others = [other.score for other in group if other is not member]
    return member.score - statistics.fmean(others)


def opo(member: Member, group: list[Member]) -> float:
    tokens = [other.score for other in group for _ in range(other.length)]
    return member.score - statistics.fmean(tokens)


def passk(member: Member, group: list[Member]) -> float:
    without = max(other.score for other in group if other is not member)
    lead = max(other.score for other in group) - without
    return lead / (std_of(group) + 1e-6)


def maxrl(member: Member, group: list[Member]) -> float:
    return (member.score - mean_of(group)) / (mean_of(group) + 1e-6)


FORMULAS = {"rloo": rloo, "rloo_vectorized": rloo, "opo": opo, "grpo_passk": passk}


@pytest.mark.parametrize("name", FORMULAS)
@settings(deadline=None, max_examples=40)
@given(rows=ragged_rows(quarters=True))
def test_an_estimator_equals_a_loop_over_rows(name, rows):
    assert_rows(rows, advantages_of(name, rows), naive(rows, FORMULAS[name]))


@settings(deadline=None, max_examples=40)
@given(ragged_rows(quarters=True))
def test_maxrl_equals_a_loop_over_rows(rows):
    rows = rows._replace(rewards=rows.rewards.abs())
    assert_rows(rows, advantages_of("maxrl", rows), naive(rows, maxrl))


@settings(deadline=None, max_examples=40)
@given(ragged_rows(quarters=True))
def test_gpg_equals_a_loop_over_rows(rows):
    everyone = [member for group in members(rows).values() for member in group]
    alpha = len(everyone) / max(sum(member.score != 0 for member in everyone), 1)
    expected = naive(rows, lambda member, group: alpha * (member.score - mean_of(group)) / 2)
    assert_rows(rows, advantages_of("gpg", rows, f_norm=2.0), expected)


@settings(deadline=None, max_examples=40)
@given(ragged_rows(quarters=True))
def test_reinforce_plus_plus_baseline_equals_a_loop_over_rows(rows):
    centred = naive(rows, lambda member, group: member.score - mean_of(group))
    has_signal = naive(rows, lambda member, group: 1.0)
    whitened = naive_whitened(rows, centred)
    expected = [value * signal for value, signal in zip(whitened, has_signal, strict=True)]
    assert_rows(rows, advantages_of("reinforce_plus_plus_baseline", rows), expected)


def test_rloo_by_hand():
    assert by_row("rloo", hand_made()) == [-1.0, 0.5, 0.5, -1.75, 2.75, -1.0]


def test_opo_by_hand():
    # a: (2 * 1 + 5 * 1) / 8 = 0.875; b: (1 * 3 + 3 * 0.5) / 8 = 0.5625
    assert by_row("opo", hand_made()) == [-0.875, 0.125, 0.125, -0.5625, 2.4375, -0.0625]


def test_gpg_by_hand():
    # Four of six rows have a score: alpha is 1.5; the means are 2 / 3 and 3.5 / 3.
    expected = [-1.0, 0.5, 0.5, -1.75, 2.75, -1.0]
    assert by_row("gpg", hand_made()) == expected
    assert by_row("gpg", hand_made(), f_norm=0.5) == [2 * value for value in expected]


def test_passk_credits_a_sole_best_with_its_lead():
    found = by_row("grpo_passk", hand_made(), norm_adv_by_std_in_grpo=False)
    assert found == [0.0, 0.0, 0.0, 0.0, 2.5, 0.0]  # in `a` two share the first place
    std = statistics.stdev(SCORES[3:])
    assert by_row("grpo_passk", hand_made())[4] == round(2.5 / std, 4)


def test_maxrl_weighs_a_prompt_that_is_solved_once_in_four_by_four():
    rows = hand_made([1, 0, 0, 0, 1, 1, 1, 0], ["hard"] * 4 + ["easy"] * 4, [1] * 8)
    found = by_row("maxrl", rows)
    assert found == [3.0, -1.0, -1.0, -1.0, 0.3333, 0.3333, 0.3333, -1.0]


def test_maxrl_leaves_a_prompt_that_is_never_solved_alone():
    assert by_row("maxrl", hand_made([0, 0, 0], ["a"] * 3, [1, 2, 1])) == [0.0, 0.0, 0.0]


def test_maxrl_refuses_negative_scores():
    rows = hand_made([-1, 1, 0], ["a"] * 3, [1, 2, 1])
    with pytest.raises(ConfigError, match="a score is negative"):
        advantages_of("maxrl", rows)
    outside = rows._replace(in_baseline=torch.tensor([False, True, True]))
    assert by_row("maxrl", outside) == [0.0, 1.0, -1.0]


def test_reinforce_plus_plus_baseline_weighs_rows_by_their_tokens():
    # Centred -0.5 on one token, 0.5 on three: mean 0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25.
    rows = hand_made([0, 1], ["a"] * 2, [1, 3])
    assert by_row("reinforce_plus_plus_baseline", rows) == [-1.5, 0.5]


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_equal_rewards_whitening_gives_a_group_of_equal_scores_no_advantage_again(name):
    scores, groups, lengths = [0, 1, 2, 2, 5], ["a", "a", "b", "b", "alone"], [1, 3, 2, 2, 1]
    found = advantages_of(name, hand_made(scores, groups, lengths))
    assert found[:2].any(dim=-1).all()
    assert not found[2:].any()
    assert advantages_of(f"{name}_verl", hand_made(scores, groups, lengths))[2:, 0].all()


def test_a_batch_in_which_nothing_is_trained_has_no_advantages():
    rows = hand_made()._replace(mask=torch.zeros(6, 5))
    for name in ("gpg", "opo", "reinforce_plus_plus_baseline", "rloo", "maxrl", "grpo_passk"):
        assert not advantages_of(name, rows).any(), name


# What the estimators estimate: every group of n tries that succeed with probability p.

P, N = 0.3, 4


def expected_gradient(name: str, **settings) -> float:
    """Sum over all groups, with their probabilities, of sum_i A_i d log pi(i) / dp, over n."""
    total = 0.0
    for wins in itertools.product([0.0, 1.0], repeat=N):
        rows = hand_made(list(wins), ["a"] * N, [1] * N)
        rows = rows._replace(rewards=rows.rewards.double())
        advantages = advantages_of(name, rows, **settings)[:, 0].tolist()
        slopes = [1 / P if win else -1 / (1 - P) for win in wins]
        weight = math.prod(P if win else 1 - P for win in wins)
        total += weight * sum(a * s for a, s in zip(advantages, slopes, strict=True)) / N
    return total


def test_rloo_estimates_the_gradient_of_the_expected_score():
    assert expected_gradient("rloo") == pytest.approx(1.0, abs=1e-12)


def test_dr_grpo_estimates_it_to_a_factor():
    found = expected_gradient("grpo", norm_adv_by_std_in_grpo=False)
    assert found == pytest.approx((N - 1) / N, abs=1e-12)


def test_passk_estimates_the_gradient_of_the_best_of_n():
    found = expected_gradient("grpo_passk", norm_adv_by_std_in_grpo=False)
    assert found * N == pytest.approx(N * (1 - P) ** (N - 1), abs=1e-12)


def test_maxrl_estimates_the_gradient_of_the_log_likelihood_cut_after_n_minus_1_terms():
    cut = sum((1 - P) ** (k - 1) for k in range(1, N))
    assert expected_gradient("maxrl", epsilon=0.0) == pytest.approx(cut, abs=1e-12)


# The page's estimator of ten lines.


def test_the_estimator_of_the_documentation_runs():
    page = Path(__file__).parents[3] / "docs/algorithms/group_relative.md"
    [source] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(source, {"__name__": "a_page"})
    assert by_row("best_of_group", hand_made()) == [-1.0, 0.0, 0.0, -3.0, 0.0, -2.5]


# The reference, by name.

BY_REFERENCE = ["grpo", "rloo", "opo", "gpg"]


@pytest.mark.parametrize("name", [*BY_REFERENCE, "grpo_passk", "reinforce_plus_plus_baseline"])
def test_without_what_the_reference_breaks_both_agree(name):
    rows = hand_made()
    found, expected = advantages_of(f"{name}_verl", rows), advantages_of(name, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BY_REFERENCE)
def test_by_reference_a_group_of_one_trains_on_its_score(name):
    rows = hand_made([3.0], ["a"], [2])
    assert by_row(f"{name}_verl", rows) == [3.0]
    assert by_row(name, rows) == [0.0]


def test_by_reference_rloo_vectorized_trains_a_group_of_one_on_nothing():
    assert by_row("rloo_vectorized_verl", hand_made([3.0], ["a"], [2])) == [0.0]


def test_by_reference_pass_at_k_of_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="has one row"):
        advantages_of("grpo_passk_verl", hand_made([3.0], ["a"], [2]))


def test_by_reference_masked_rewards_and_masked_rows_count():
    rows = hand_made([0, 2, 6], ["a"] * 3, [1, 1, 2])
    rows.mask[2] = 0
    rows.rewards[0, 1] = 1.0  # behind the last trained token
    found = by_row("rloo_verl", rows)
    assert found == [1 - 4, 2 - 3.5, 0.0]
    assert by_row("rloo", rows) == [-2.0, 2.0, 0.0]


def test_by_reference_a_row_outside_the_baseline_is_left_out():
    rows = hand_made([0, 2, 6], ["a"] * 3, [1, 1, 2])
    rows = rows._replace(in_baseline=torch.tensor([True, True, False]))
    assert by_row("rloo_verl", rows) == [-2.0, 2.0, 0.0]
