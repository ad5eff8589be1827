"""Memory that is freed stays with the process."""

import resource

import pytest
import torch

from agentrl.workers.memory import keep_freed_memory

PAGE_BYTES = resource.getpagesize()
NUM_BYTES = 64 * 2**20


def count_page_faults(num_tensors: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_tensors):
        torch.ones(NUM_BYTES, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_used_again_without_page_faults():
    if not keep_freed_memory():
        pytest.skip("another C library than glibc")
    count_page_faults(10)
    assert count_page_faults(10) < 2 * NUM_BYTES / PAGE_BYTES


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_variables_of_the_user_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
