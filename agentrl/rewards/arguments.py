"""Hold `reward_kwargs` against the scorers that are to take them, before anything is scored."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.plugins.keys import unknown_key
from agentrl.rewards.sources import BUNDLED, SOURCES

KEY = "reward_kwargs"
TOLD = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
"""What every scorer is told of a request, whatever `reward_kwargs` say."""


def check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a scorer takes these arguments.

    Raises:
        ConfigError: naming the first that it does not, and the nearest that it does.
    """
    if kwargs:
        _check(kwargs, arguments_of(function))


def check_arguments_by_source(kwargs: Mapping[str, Any]) -> None:
    """Check that each argument is one of a bundled scorer to which a `data_source` leads.

    Raises:
        ConfigError: naming the first that no such scorer takes.
    """
    if kwargs:
        names = sorted(set(SOURCES.values()))
        taken = [arguments_of(BUNDLED[name].load()) or set[str]() for name in names]
        _check(kwargs, set[str]().union(*taken))


def arguments_of(function: Callable[..., Any]) -> set[str] | None:
    """List what a scorer takes beside what it is told; None: whatever it is given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C: it has no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name} - TOLD


def _check(kwargs: Mapping[str, Any], known: set[str] | None) -> None:
    for name in kwargs:
        if known is not None and name not in known:
            raise unknown_key(name, sorted(known), file=None, parent=KEY)
