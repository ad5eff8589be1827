import pytest
import torch

from agentrl.algorithms.masked import TrainedTokenIndex, compute_discounted_sums


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
