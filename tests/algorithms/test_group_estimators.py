"""Each group estimator against a loop over rows, and by hand."""

import itertools
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from agentrl.errors import ConfigError
from tests.fakes.groups import (
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
from tests.fakes.tensors import ragged_rows


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
    page = Path(__file__).parents[2] / "docs/algorithms/group_relative.md"
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
    with pytest.raises(ValueError, match="lone row"):
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
