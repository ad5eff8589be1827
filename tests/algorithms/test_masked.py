import pytest
import torch

from agentrl.algorithms.masked import (
    TrainedTokenIndex,
    compute_discounted_sums,
    masked_whiten,
    whiten,
    zero_masked,
)


def naive_sums(values: torch.Tensor, decay: float) -> torch.Tensor:
    sums, later = torch.zeros_like(values), 0.0
    for i in reversed(range(values.shape[1])):
        later = values[:, i] + decay * later
        sums[:, i] = later
    return sums


@pytest.mark.parametrize("width", [0, 1, 2, 63, 64, 65, 200, 4096, 5000])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
def test_blocks_sum_as_a_loop_does(width, decay):
    values = torch.randn(3, width, dtype=torch.float64)
    found = compute_discounted_sums(values, decay)
    torch.testing.assert_close(found, naive_sums(values, decay), rtol=1e-12, atol=1e-12)


def test_a_decay_that_underflows_over_the_row_loses_nothing():
    values, decay = torch.ones(1, 4096), 0.9
    assert torch.tensor(decay) ** 4096 == 0  # what dividing by a cumulative product would meet
    found = compute_discounted_sums(values, decay)
    torch.testing.assert_close(found[0, 0], torch.tensor(10.0))
    torch.testing.assert_close(found, naive_sums(values, decay))


def test_trained_tokens_are_packed_and_unpacked():
    tokens = TrainedTokenIndex.of(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]))
    values = torch.arange(12).view(3, 4)
    packed = tokens.pack(values)
    assert packed.tolist() == [[1, 3, 0], [0, 0, 0], [8, 9, 10]]
    assert tokens.lengths.tolist() == [2, 0, 3]
    assert tokens.unpack(packed + 1).tolist() == [[0, 2, 0, 4], [0, 0, 0, 0], [9, 10, 11, 0]]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_trained_tokens_packs_to_nothing(shape):
    tokens = TrainedTokenIndex.of(torch.zeros(shape))
    packed = tokens.pack(torch.full(shape, torch.nan))
    assert packed.shape == (shape[0], 1)
    assert not packed.any()
    assert torch.equal(tokens.unpack(packed), torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zero_masked_equals_where_also_for_nan_and_for_one_value_a_row(dtype):
    mask = torch.rand(5, 300) < 0.5
    values = torch.randn(5, 300, dtype=dtype)
    spoiled = torch.where(mask, values, torch.nan)
    assert torch.equal(zero_masked(spoiled, mask), torch.where(mask, values, 0.0))
    column = values[:, :1]
    assert torch.equal(zero_masked(column, mask), torch.where(mask, column, 0.0))
    transposed = spoiled.t().contiguous().t()
    assert torch.equal(zero_masked(transposed, mask), torch.where(mask, values, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # NumPy has no bfloat16
def test_sums_and_following_values_of_trained_tokens_stay_in_their_rows(dtype):
    tokens = TrainedTokenIndex.of(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 0, 1]]))
    taken = torch.tensor([1, 2, 3, 4, 5], dtype=dtype)
    assert tokens.following(taken).tolist() == [2, 0, 0, 5, 0]
    assert tokens.sum_discounted(taken, 0.5).tolist() == [2, 2, 3, 6.5, 5]
    assert tokens.put(taken).tolist() == [[0, 1, 2], [0, 0, 0], [3, 0, 0], [4, 0, 5]]


def test_blocks_of_rows_cover_the_batch_in_order():
    mask = (torch.rand(5, 2**19) < 0.5).long()  # several blocks
    blocks = TrainedTokenIndex.of(mask).split()
    assert len(blocks) > 1
    assert torch.equal(torch.cat([block.mask for _, block in blocks]), mask.bool())
    assert torch.equal(torch.cat([mask[rows].bool() for rows, _ in blocks]), mask.bool())
    lengths = torch.cat([block.lengths for _, block in blocks])
    assert torch.equal(lengths, mask.sum(dim=-1))


@pytest.mark.parametrize("first", [0.0, 1e6])
def test_whitening_is_exact_whichever_value_is_the_first(first):
    values = torch.cat([torch.tensor([first]), torch.randn(2**18) + 100])
    exact = values.double()
    expected = (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()
    torch.testing.assert_close(whiten(values), expected.float(), rtol=1e-6, atol=1e-6)


def test_values_with_a_gradient_are_whitened_with_it():
    values = torch.randn(2, 5, requires_grad=True)
    masked_whiten(values, torch.ones(2, 5)).square().sum().backward()
    assert values.grad is not None
