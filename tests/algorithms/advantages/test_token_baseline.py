import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import get_adv_estimator_fn
from tests.fakes.turn_rows import TurnRows, turn_rows

OURS = ["optimal_token_baseline", "tir_optimal_token_baseline"]


def paths_of(rows: TurnRows, is_weighted: bool) -> list[tuple[list[float], list[float]]]:
    """Of each row: return-to-go and weight so far of each trained token, by a plain loop."""
    found = []
    for row in range(len(rows.index)):
        places = [i for i, bit in enumerate(rows.mask[row].tolist()) if bit]
        returns = [sum(rows.rewards[row, j].item() for j in places if j >= i) for i in places]
        energies = []
        for i in places:
            norm = 1 - 2 * math.exp(log_probs(rows)[row, i]) + squares(rows)[row, i].item()
            energies.append(norm * (is_weights(rows)[row, i].item() ** 2 if is_weighted else 1))
        found.append((returns, [sum(energies[: k + 1]) for k in range(len(energies))]))
    return found


def log_probs(rows: TurnRows) -> torch.Tensor:
    return rows.values.abs() - 1


def squares(rows: TurnRows) -> torch.Tensor:
    return rows.values.square() + 1


def is_weights(rows: TurnRows) -> torch.Tensor:
    return rows.values + 1


def naive_baseline(rows: TurnRows, is_weighted: bool, handle_zero_tail: bool) -> torch.Tensor:
    paths, found = paths_of(rows, is_weighted), torch.zeros_like(rows.rewards)
    for row in range(len(rows.index)):
        group = rows.group(row)
        scores = [paths[r][0][0] for r in group]
        if row not in group or max(scores) == min(scores):
            continue
        places = [i for i, bit in enumerate(rows.mask[row].tolist()) if bit]
        for k, i in enumerate(places):
            there = [paths[r] for r in group if len(paths[r][0]) > k]
            weight = sum(weights[k] for _, weights in there) + 1e-8
            baseline = sum(returns[k] * weights[k] for returns, weights in there) / weight
            if len(there) == 1 and handle_zero_tail:
                baseline = 0.0
            found[row, i] = paths[row][0][k] - baseline
    return found


@pytest.mark.parametrize("name", OURS)
@settings(deadline=None, max_examples=40)
@given(rows=turn_rows(), is_weighted=st.booleans(), handle_zero_tail=st.booleans())
def test_the_baseline_equals_a_naive_loop(name, rows, is_weighted, handle_zero_tail):
    advantages, _ = get_adv_estimator_fn(name)(
        rows.rewards, rows.mask, rows.index, log_probs(rows), squares(rows),
        is_weights(rows) if is_weighted else None, handle_zero_tail, in_baseline=rows.in_baseline,
    )  # fmt: skip
    expected = naive_baseline(rows, is_weighted, handle_zero_tail)
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)


def batch_of(rewards, mask, **columns):
    rewards, mask = torch.tensor(rewards), torch.tensor(mask)
    half = torch.full_like(rewards, math.log(0.5))
    given = {"old_log_probs": half, "sum_pi_squared": torch.full_like(rewards, 0.5), **columns}
    index = np.array(["g"] * len(rewards), dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "index": index, **given}


def test_the_baseline_by_hand():
    # Each token's w is 1 - 2 * 0.5 + 0.5 = 0.5, or four times that under an importance weight of 2.
    weights = torch.tensor([[2.0, 2.0], [1.0, 1.0]])
    batch = batch_of([[0.0, 1.0], [0.0, 0.0]], [[1, 1], [1, 1]], rollout_is_weights=weights)
    advantages, returns = get_adv_estimator_fn("optimal_token_baseline")(**batch)
    torch.testing.assert_close(advantages, torch.tensor([[0.2, 0.2], [-0.8, -0.8]]))
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(("handle_zero_tail", "at_the_end"), [(True, 1.0), (False, 0.0)])
def test_the_tail_of_the_longest_row_has_its_return_or_nothing(handle_zero_tail, at_the_end):
    batch = batch_of([[0.0, 9.0, 1.0], [0.0, 0.0, 0.0]], [[1, 0, 1], [1, 0, 0]])
    advantages, _ = get_adv_estimator_fn("tir_optimal_token_baseline")(
        **batch, handle_zero_tail=handle_zero_tail
    )
    expected = torch.tensor([[0.5, 0.0, at_the_end], [-0.5, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", OURS)
def test_equal_rewards_equal_scores_give_exactly_zero_also_in_the_tail(name):
    batch = batch_of([[0.0, 0.0, 0.1], [0.1, 0.0, 0.0]], [[1, 1, 1], [1, 0, 0]])
    assert not get_adv_estimator_fn(name)(**batch)[0].any()
    reference = get_adv_estimator_fn(f"{name}_verl")(**batch)[0]
    torch.testing.assert_close(reference[0, 1:], torch.tensor([0.1, 0.1]))


@pytest.mark.parametrize("name", OURS)
def test_equal_rewards_a_group_of_one_trains_on_nothing_and_by_name_on_its_returns(name):
    batch = batch_of([[0.0, 7.0, 3.0]], [[1, 0, 1]])
    assert not get_adv_estimator_fn(name)(**batch)[0].any()
    advantages, returns = get_adv_estimator_fn(f"{name}_verl")(**batch)
    assert advantages.tolist() == [[3.0, 0.0, 3.0]]
    assert returns.tolist() == [[3.0, 3.0, 3.0]]


def test_only_the_reference_compares_by_padded_position():
    batch = batch_of([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [[1, 0, 1], [1, 1, 0]])
    ours = get_adv_estimator_fn("optimal_token_baseline")(**batch)[0]
    torch.testing.assert_close(ours[0], torch.tensor([0.5, 0.0, 0.5]), atol=1e-6, rtol=0)
    reference = get_adv_estimator_fn("optimal_token_baseline_verl")(**batch)[0]
    torch.testing.assert_close(reference[0], torch.tensor([0.5, 0.0, 0.0]), atol=1e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(rows=turn_rows(), handle_zero_tail=st.booleans())
def test_the_references_agree_where_they_are_right(rows, handle_zero_tail):
    """Without observations, equal scores and groups of one all three are the same."""
    lengths = rows.mask.sum(-1, keepdim=True)
    mask = (torch.arange(rows.mask.shape[1]) < lengths).long()
    last = torch.zeros_like(rows.rewards).scatter(1, (lengths - 1).clamp(min=0), 1.0)
    rewards = last * (1.0 + torch.arange(len(mask)))[:, None] * (lengths > 0)
    index = np.array(["g"] * len(mask), dtype=object)
    if (lengths > 0).sum() < 2:
        return
    args = (rewards, mask, index, log_probs(rows), squares(rows), None, handle_zero_tail)
    found = [get_adv_estimator_fn(name)(*args)[0] for name in (OURS[0], f"{OURS[1]}_verl")]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    if (lengths > 0).all():
        third = get_adv_estimator_fn(f"{OURS[0]}_verl")(*args)[0]
        torch.testing.assert_close(found[0], third, rtol=1e-5, atol=1e-5)
