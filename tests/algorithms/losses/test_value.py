from typing import get_args

import pytest
import torch

from agentrl.algorithms import LossScale, compute_value_loss
from agentrl.config.schema.training import LossAggMode
from tests.fakes.naive_losses import BUDGET, naive_agg

MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
all_modes = pytest.mark.parametrize("mode", get_args(LossAggMode))


def values(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("vpred", "value", "ret", "loss", "clipped"),
    [(1.1, 1.0, 2.0, 0.405, 0), (2.0, 1.0, 2.0, 0.32, 1), (0.0, 1.0, 2.0, 2.0, 0),
     (0.5, 1.0, 0.0, 0.32, 1)],
)  # fmt: skip
def test_value_loss_by_hand(vpred, value, ret, loss, clipped):
    """Clip 0.2."""
    one = torch.ones(1, 1, dtype=torch.float64)
    found, clipfrac = compute_value_loss(vpred * one, ret * one, value * one, one, 0.2)
    assert found.item() == pytest.approx(loss)
    assert clipfrac.item() == clipped


@all_modes
def test_value_loss_equals_a_naive_loop(mode):
    vpreds, returns, old = values(0), values(1), values(2)
    scale = LossScale.of(MASK, loss_scale_factor=BUDGET)
    rows: list[list[float]] = []
    for i, bits in enumerate(MASK.tolist()):
        row = []
        for t, bit in enumerate(bits):
            if bit:
                v, r, o = (x[i, t].item() for x in (vpreds, returns, old))
                near = min(max(v, o - 0.3), o + 0.3)
                row.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
        rows.append(row)
    found, _ = compute_value_loss(vpreds, returns, old, MASK, 0.3, mode, scale=scale)
    assert found.item() == pytest.approx(naive_agg(rows, mode))


@all_modes
def test_gradient_of_the_value_loss_equals_central_differences(mode):
    scale = LossScale.of(MASK, loss_scale_factor=BUDGET)

    def loss(vpreds):
        return compute_value_loss(vpreds, values(1), values(2), MASK, 0.3, mode, scale=scale)[0]

    assert torch.autograd.gradcheck(loss, values(0).requires_grad_())


@all_modes
def test_layout_is_invisible_micro_batches_change_neither_value_loss_nor_clipfrac(mode):
    vpreds, returns, old = values(0), values(1), values(2)
    scale = LossScale.of(MASK, loss_scale_factor=BUDGET)
    whole = compute_value_loss(vpreds, returns, old, MASK, 0.3, mode, scale=scale)
    parts = [
        compute_value_loss(
            vpreds[rows], returns[rows], old[rows], MASK[rows], 0.3, mode, scale=scale
        )
        for rows in ([2, 0], [1])
    ]
    for place in range(2):
        torch.testing.assert_close(parts[0][place] + parts[1][place], whole[place])


def test_observations_are_invisible_not_even_nan_on_masked_values_reaches_the_gradient():
    vpreds = torch.tensor([[1.0, torch.nan]], requires_grad=True)
    spoiled = torch.tensor([[0.0, torch.inf]])
    loss, clipfrac = compute_value_loss(vpreds, spoiled, spoiled, torch.tensor([[1, 0]]), 2.0)
    loss.backward()
    assert vpreds.grad is not None
    assert vpreds.grad.tolist() == [[1.0, 0.0]]
    assert (loss.item(), clipfrac.item()) == (0.5, 0.0)


def test_values_of_which_none_is_trained_have_loss_and_gradient_zero():
    vpreds = torch.full((2, 3), torch.nan, requires_grad=True)
    loss, _ = compute_value_loss(vpreds, vpreds.detach(), vpreds.detach(), torch.zeros(2, 3), 0.2)
    loss.backward()
    assert loss.item() == 0.0
    assert vpreds.grad is not None
    assert not vpreds.grad.any()
