import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import LossScale, agg_loss, masked_mean, masked_sum
from agentrl.algorithms.aggregation import compute_row_weights
from agentrl.config.schema.training import LossAggMode
from agentrl.errors import ConfigError
from tests.fakes.naive_losses import BUDGET, naive_agg
from tests.fakes.tensors import masks

MODES = list(get_args(LossAggMode))
all_modes = pytest.mark.parametrize("mode", MODES)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(values, mask) -> list[list[float]]:
    return [
        [x for x, m in zip(row, bits, strict=True) if m]
        for row, bits in zip(values.tolist(), mask.tolist(), strict=True)
    ]


@all_modes
@settings(deadline=None, max_examples=40)
@given(mask=masks())
def test_aggregation_equals_a_naive_loop(mode, mask):
    loss = noise(*mask.shape)
    found = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET).item()
    assert found == pytest.approx(naive_agg(trained(loss, mask), mode), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 10 / 3), ("token-sum", 10.0), ("seq-mean-token-sum", 5.0),
     ("seq-mean-token-mean", 4.0), ("seq-mean-token-sum-norm", 5.0 / BUDGET)],
)  # fmt: skip
def test_aggregation_by_hand(mode, expected):
    loss = torch.tensor([[1.0, 3.0, 9.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    found = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET)
    assert found.item() == pytest.approx(expected)


@all_modes
def test_a_batch_in_which_nothing_is_trained_has_loss_and_gradient_zero(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    found = agg_loss(loss, torch.zeros(2, 3), mode, loss_scale_factor=BUDGET)
    found.backward()
    assert found.item() == 0.0
    assert loss.grad is not None
    assert not loss.grad.any()


@all_modes
@settings(deadline=None, max_examples=40)
@given(mask=masks(), data=st.data())
def test_observations_are_invisible_masked_tokens_and_rows_change_no_loss_and_no_gradient(
    mode, mask, data
):
    loss = noise(*mask.shape).requires_grad_()
    rows, width = mask.shape
    places = torch.stack(
        [
            torch.tensor(sorted(data.draw(st.permutations(range(width + 3)))[:width]))
            for _ in range(rows)
        ]
    )
    wide = torch.full((rows, width + 3), torch.inf, dtype=torch.float64).scatter(1, places, loss)
    bits = torch.zeros(rows, width + 3, dtype=mask.dtype).scatter(1, places, mask)
    wide, bits = (
        torch.nn.functional.pad(wide, (0, 0, 0, 2)),
        torch.nn.functional.pad(bits, (0, 0, 0, 2)),
    )
    before = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET)
    after = agg_loss(wide, bits, mode, loss_scale_factor=BUDGET)
    torch.testing.assert_close(after, before)
    one, other = (torch.autograd.grad(value, loss)[0] for value in (before, after))
    torch.testing.assert_close(one, other)


def test_the_norm_mode_does_not_depend_on_the_padded_length():
    with pytest.raises(ConfigError, match="response budget"):
        agg_loss(torch.ones(1, 3), torch.ones(1, 3), "seq-mean-token-sum-norm")


def test_several_ranks_need_the_count_that_their_mode_divides_by():
    ones = torch.ones(1, 3)
    with pytest.raises(ConfigError, match="2 ranks"):
        agg_loss(ones, ones, "token-mean", dp_size=2, global_batch_size=2)
    assert agg_loss(ones, ones, "token-mean", dp_size=2, batch_num_tokens=6).item() == 1.0
    assert agg_loss(ones, ones, "token-sum", dp_size=2).item() == 6.0


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ConfigError, match="seq-mean-token-sum-norm"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")


def test_masked_sums_and_means_ignore_what_is_masked():
    values, mask = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1, 0, 1])
    assert masked_sum(values, mask).item() == 5.0
    assert masked_mean(values, mask).item() == 2.5
    assert masked_mean(values, torch.zeros(3)).item() == 0.0


# Trajectories in several rows.


def test_a_row_weighs_its_share_of_the_trajectory():
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    found = compute_row_weights(mask, torch.tensor([7, 7, 7, 8]))
    assert found.tolist() == [0.75, 0.25, 0.0, 0.0]


def test_rows_of_one_trajectory_are_one_sequence_by_hand():
    loss = torch.tensor([[1.0, 3.0], [8.0, 0.0], [6.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
    weights = compute_row_weights(mask, torch.tensor([0, 0, 1]))
    scale = LossScale.of(mask, row_weights=weights)
    assert scale.global_batch_size == 2
    assert scale.aggregate(loss, mask, "seq-mean-token-mean").item() == pytest.approx(5.0)
    assert scale.aggregate(loss, mask, "seq-mean-token-sum").item() == pytest.approx(9.0)
    assert agg_loss(loss, mask, "seq-mean-token-mean", row_weights=weights).item() == pytest.approx(
        5.0
    )


def test_a_scale_without_weights_is_that_of_its_micro_batches():
    scale = LossScale.of(torch.ones(2, 2))
    assert scale.at([1]) is scale


@all_modes
@settings(deadline=None, max_examples=40)
@given(mask=masks(), data=st.data())
def test_splitting_trajectories_into_rows_changes_no_loss_and_no_gradient(mode, mask, data):
    loss = noise(*mask.shape).requires_grad_()
    rows, width = mask.shape
    whole = LossScale.of(mask, loss_scale_factor=BUDGET)
    expected = whole.aggregate(loss, mask, mode)
    # Each token is given to one of three segments of its trajectory; some segments stay empty.
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, width)] * 2))) for _ in range(rows)]
    column = torch.arange(width)
    segment = torch.stack([(column >= a).long() + (column >= b).long() for a, b in cuts])
    pieces = torch.cat([mask * (segment == number) for number in range(3)])
    weights = compute_row_weights(pieces, torch.arange(rows).repeat(3))
    scale = LossScale.of(pieces, loss_scale_factor=BUDGET, row_weights=weights)
    order = data.draw(st.permutations(range(3 * rows)))
    half = data.draw(st.integers(0, 3 * rows))
    parts = [
        scale.at(index).aggregate(loss.repeat(3, 1)[index], pieces[index], mode)
        for index in (order[:half], order[half:])
    ]
    total = parts[0] + parts[1]
    assert (scale.batch_num_tokens, scale.global_batch_size) == (
        whole.batch_num_tokens, whole.global_batch_size,
    )  # fmt: skip
    torch.testing.assert_close(total, expected)
    one, other = (torch.autograd.grad(value, loss)[0] for value in (expected, total))
    torch.testing.assert_close(other, one)
    assert math.isfinite(total.item())
