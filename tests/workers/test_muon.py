"""Muon on stacks against torch's."""

import pytest
import torch

from agentrl.workers import muon
from agentrl.workers.muon import StackedMuon


@pytest.mark.parametrize("max_elements", [1 << 20, 1024])
def test_a_stack_is_updated_as_each_matrix_by_torch(
    monkeypatch: pytest.MonkeyPatch, max_elements: int
):
    monkeypatch.setattr(muon, "_MAX_ELEMENTS", max_elements)
    shapes = [(16, 16), (48, 16), (16, 16), (16, 48), (48, 16), (16, 16)]
    draws = torch.Generator().manual_seed(0)
    begin = [torch.randn(shape, generator=draws) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(one.clone()) for one in begin] for _ in range(2))
    optimizers = [
        kind(weights, lr=0.05, weight_decay=0.1)
        for kind, weights in ((StackedMuon, ours), (torch.optim.Muon, theirs))
    ]
    for _ in range(3):
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last has no gradient
            one.grad = torch.randn(one.shape, generator=draws)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, first in zip(ours, theirs, begin, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # bfloat16 in the iteration
        assert torch.equal(one, first) == (one.grad is None)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        buffers = (
            optimizer.state[weight]["momentum_buffer"]
            for optimizer, weight in zip(optimizers, (one, other), strict=True)
        )
        torch.testing.assert_close(*buffers)


def test_a_stack_of_experts_is_updated_as_its_matrices_are(monkeypatch: pytest.MonkeyPatch):
    draws = torch.Generator().manual_seed(0)
    begin = torch.randn(4, 24, 16, generator=draws)
    experts = torch.nn.Parameter(begin.clone())
    matrices = [torch.nn.Parameter(one.clone()) for one in begin]
    optimizers = [StackedMuon(one, lr=0.05, weight_decay=0.1) for one in ([experts], matrices)]
    for limit in (1 << 20, 24 * 16):
        monkeypatch.setattr(muon, "_MAX_ELEMENTS", limit)
        experts.grad = torch.randn(begin.shape, generator=draws)
        for matrix, grad in zip(matrices, experts.grad, strict=True):
            matrix.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(experts, torch.stack(list(matrices)), rtol=0, atol=1e-3)


def test_a_shard_without_experts_takes_a_step():
    empty = torch.nn.Parameter(torch.zeros(0, 24, 16))
    empty.grad = torch.zeros_like(empty)
    StackedMuon([empty], lr=0.05, weight_decay=0.1).step()
