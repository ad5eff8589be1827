"""`verl.utils.rollout_trace`: tracing, which is not needed: every call is recorded anyway."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from agentrl.tools.from_verl import rollout_trace_op

__all__ = ["rollout_trace_attr", "rollout_trace_op"]


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Generator[None]:
    """Do nothing."""
    yield
