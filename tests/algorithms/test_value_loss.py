"""The value loss against a naive loop and numbers computed by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.value_loss import compute_explained_variance, compute_value_loss


def naive_loss(vpreds, returns, values, mask, clip) -> tuple[float, float]:
    """The mean over trained tokens, token by token, and the share that the clip decides."""
    losses, clipped = [], []
    for row in range(len(mask)):
        for token in range(len(mask[0])):
            if mask[row][token]:
                new, old = float(vpreds[row][token]), float(values[row][token])
                target = float(returns[row][token])
                near = min(max(new, old - clip), old + clip)
                losses.append(max((new - target) ** 2, (near - target) ** 2) / 2)
                clipped.append((near - target) ** 2 > (new - target) ** 2)
    count = max(len(losses), 1)
    return sum(losses) / count, sum(clipped) / count


@given(st.integers(0, 2**31), st.floats(0.01, 2.0))
def test_value_loss_equals_a_naive_loop(seed: int, clip: float):
    draw = torch.Generator().manual_seed(seed)
    vpreds, returns, values = torch.randn(3, 4, 7, generator=draw, dtype=torch.float64)
    mask = torch.randint(0, 2, (4, 7), generator=draw)
    found = compute_value_loss(vpreds, returns, values, mask, clip)
    loss, clip_frac = naive_loss(vpreds, returns, values, mask, clip)
    assert torch.allclose(found.loss, torch.tensor(loss, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(found.clip_frac, torch.tensor(clip_frac, dtype=torch.float64))


def test_value_that_moved_too_far_toward_its_return_has_no_gradient():
    # By hand: 0.7 is clipped to 0.5, of which the loss to 1.0 is 0.125; 0.3 to 1.0 has 0.245.
    vpreds = torch.tensor([[0.7, 0.3]], requires_grad=True)
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    found = compute_value_loss(vpreds, ones, zeros, ones, 0.5)
    assert torch.isclose(found.loss, torch.tensor((0.125 + 0.245) / 2))
    assert found.clip_frac == 0.5
    found.loss.backward()
    assert vpreds.grad is not None
    assert torch.allclose(vpreds.grad, torch.tensor([[0.0, -0.35]]))


def test_layout_is_invisible_losses_of_micro_batches_add_up():
    draw = torch.Generator().manual_seed(0)
    vpreds, returns, values = torch.randn(3, 4, 7, generator=draw)
    mask = torch.randint(0, 2, (4, 7), generator=draw)
    columns = (vpreds, returns, values, mask)
    scale = LossScale.of(mask)
    parts = [
        compute_value_loss(*(column[row : row + 1] for column in columns), 0.2, scale=scale)
        for row in range(4)
    ]
    whole = compute_value_loss(*columns, 0.2)
    assert torch.isclose(sum(part.loss for part in parts), whole.loss)  # pyright: ignore[reportArgumentType]
    assert torch.isclose(sum(part.clip_frac for part in parts), whole.clip_frac)  # pyright: ignore[reportArgumentType]


def test_observations_are_invisible_to_the_value_loss():
    mask = torch.tensor([[1, 0, 1]])
    clean, nan = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, float("nan"), 2.0]])
    zeros = torch.zeros(1, 3)
    assert (
        compute_value_loss(nan, zeros, nan, mask, 0.2).loss
        == compute_value_loss(clean, zeros, clean, mask, 0.2).loss
    )


def test_explained_variance_by_hand():
    mask = torch.tensor([[1, 1, 1, 0]])
    returns = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    assert compute_explained_variance(returns, returns, mask) == 1.0
    assert compute_explained_variance(torch.full((1, 4), 5.0), returns, mask) == 0.0
    assert compute_explained_variance(-returns, returns, mask) == -3.0
    assert compute_explained_variance(returns, torch.ones(1, 4), mask) == 0.0
