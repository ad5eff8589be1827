"""One sandbox for all requests of a run, made when the first of them needs it."""

import logging
from collections.abc import Callable
from functools import partial

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import AgentRLError
from agentrl.plugins.call import PerLoop
from agentrl.sandbox.base import Sandbox

logger = logging.getLogger(__name__)

MakeSandbox = Callable[[SandboxConfig], Sandbox]


class SharedSandbox:
    """The sandbox of a plug-in, which is built before there is an event loop.

    A run has one event loop, and so one sandbox; where a later loop asks, as in tests, it gets a
    new one.

    Args:
        config: Its keys.
        make: Makes it; None: `make_sandbox`. A test may give its own.
    """

    def __init__(self, config: SandboxConfig, make: MakeSandbox | None = None) -> None:
        self.config = config
        self._sandboxes = PerLoop(partial(make or _make_sandbox, config))

    def get(self) -> Sandbox:
        """Give the running loop's sandbox.

        Raises:
            SandboxError: where no provider can be had.
            MissingExtraError: where the one that was asked for is not installed.
        """
        return self._sandboxes.get()

    async def close(self) -> None:
        """End the sandbox; one of a loop that is gone ended with it. May be called twice."""
        if (sandbox := self._sandboxes.pop()) is not None:
            await sandbox.close()


def check_sandbox(config: SandboxConfig, *, key: str) -> None:
    """Find the provider, so that a run which has none ends before it begins.

    Args:
        config: The sandbox's keys.
        key: Where they stand, for the error.

    Raises:
        SandboxError: with what is missing.
        MissingExtraError: likewise.
        ConfigError: for a key that this provider needs.
    """
    try:
        _make_sandbox(config)
    except AgentRLError as error:
        inner = error.details.get("key")
        error.details["key"] = f"{key}.{inner}" if inner else key
        raise


def tell_unread(config: SandboxConfig, *, key: str) -> None:
    """Warn of keys of a plug-in's sandbox that are set and have no effect."""
    for name, reason in config.find_unread().items():
        logger.warning("%s.%s has no effect: %s", key, name, reason)


def _make_sandbox(config: SandboxConfig) -> Sandbox:
    from agentrl.sandbox.choice import make_sandbox

    return make_sandbox(config)
