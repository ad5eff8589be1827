from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from agentrl.workers.rng import (
    capture_random_state,
    choose_exact_kernels,
    restore_random_state,
)
from tests.fakes.pretend_cuda import pretend_cuda


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("kernels")
def test_deterministic_kernels_do_not_fill_memory_that_is_overwritten():
    choose_exact_kernels(torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_only_the_ranks_own_generator_is_saved_and_restored():
    with pretend_cuda(num_devices=3) as pretend:
        torch.cuda.set_device(1)
        state = capture_random_state()
        assert len(state.torch_cuda) == 1
        pretend.generators.update({0: b"other", 1: b"changed"})
        restore_random_state(state)
        assert pretend.generators == {0: b"other", 1: b"device 1", 2: b"device 2"}


def test_checkpoint_with_the_generators_of_all_devices_restores_the_own_one():
    with pretend_cuda(num_devices=3) as pretend:
        torch.cuda.set_device(1)
        state = capture_random_state()
        first, own = "AAAA", state.torch_cuda[0]
        pretend.generators[1] = b"changed"
        restore_random_state(replace(state, torch_cuda=[first, own, first]))
        assert pretend.generators[1] == b"device 1"
