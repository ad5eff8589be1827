"""What every test stands on: no hub, one thread, no deadlines on a machine that is shared."""

import gc
import os

# Before torch or a hub client is imported by any test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "agentrl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("agentrl")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without garbage collection, and leave what the imports made out of it ever after.

    They make a million objects: to search them takes .4 s, and every engine that closes does it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few word problems and an untrained policy, made once; only to be read."""
    from tests.fakes.runs import make_home

    return make_home(tmp_path_factory.mktemp("home"))
