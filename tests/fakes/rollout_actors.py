"""Rollout workers in actors of a small Ray cluster."""

import os
from typing import Any

from agentrl.trainer.rollout_worker import RolloutWorker


class HostedWorker:
    """A rollout worker in an actor."""

    def __init__(self) -> None:
        self._worker = RolloutWorker()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, or return the process's id."""
        return os.getpid() if method == "pid" else await getattr(self._worker, method)(*arguments)
