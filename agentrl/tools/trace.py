"""What tools that were written for verl decorate their `execute` with."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(method: F) -> F:
    """Leave a method as it is: every call of a tool is recorded on its request anyway."""
    return method
