"""Sandboxes for the tests, with every provider that can isolate code on this machine."""

from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.sandbox import Sandbox, make_sandbox
from agentrl.sandbox.factory import unavailable_reason
from agentrl.sandbox.spawner_client import LocalProvider


def descendants() -> list[int]:
    """List all processes below this one."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


MakeSandbox = Callable[..., Sandbox]


@pytest.fixture(params=["sandlock", "bubblewrap"])
def provider(request: pytest.FixtureRequest) -> LocalProvider:
    """Each provider that isolates code."""
    if reason := unavailable_reason(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
async def make(provider: LocalProvider) -> AsyncIterator[MakeSandbox]:
    """Make sandboxes of some configuration, which are closed at the end."""
    made: list[Sandbox] = []

    def make_one(**keys: object) -> Sandbox:
        config = SandboxConfig.model_validate({"provider": provider, "num_warm": 0, **keys})
        made.append(make_sandbox(config))
        return made[-1]

    yield make_one
    for sandbox in made:
        await sandbox.close()


@pytest.fixture
def sandbox(make: MakeSandbox) -> Sandbox:
    """A sandbox that configures nothing."""
    return make()
