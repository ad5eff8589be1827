from collections.abc import Iterator

import pytest
import torch

from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.flash_attention import kernels_of_cuda


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of one rank on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield start_world("cpu", timeout_s=60)
    stop_world()
    torch.set_num_threads(threads)


@pytest.fixture
def cuda_kernels() -> Iterator[None]:
    """Have the attention kernels of CUDA on a CPU."""
    with kernels_of_cuda():
        yield
