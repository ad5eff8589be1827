"""Memory that is freed stays with the process."""

import subprocess
import sys

import pytest

from agentrl.workers.memory import keep_freed_memory

# Runs in a process of its own. After an allocation that failed, glibc serves a thread from another
# arena, which never keeps blocks of this size: in this process an earlier test may have done that.
COUNT_PAGE_FAULTS = """
import resource, torch
from agentrl.workers.memory import keep_freed_memory

assert keep_freed_memory()

def count(num_tensors):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_tensors):
        torch.ones(64 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

count(10)
print(count(10), 64 * 2**20 // resource.getpagesize())
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_freed_memory_is_used_again_without_page_faults():
    if not keep_freed_memory():
        pytest.skip("another C library than glibc")
    command = [sys.executable, "-c", COUNT_PAGE_FAULTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    num_faults, pages_of_one = map(int, done.stdout.split())
    assert num_faults < 2 * pages_of_one


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_variables_of_the_user_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
