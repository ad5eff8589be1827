"""Check the `tools_kwargs` of rows against the methods that will receive them.

A keyword that a method does not accept fails every request of its row. A misspelled keyword that
the method accepts by `**kwargs` has no effect, without any error. This check finds both before the
first rollout.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentrl.errors import DataError, did_you_mean
from agentrl.tools.base import BaseTool
from agentrl.tools.function_tool import FunctionTool
from agentrl.tools.runtime.instance import ToolKwargs
from agentrl.tools.signatures import create_arguments

_FIELDS = ToolKwargs.model_fields.keys()
_KWARGS = "_kwargs"
_NEAR = 0.7
"""Similarity from which a key may be a misspelled parameter."""


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters that a method accepts by name."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool


class RowKwargs:
    """Check the `tools_kwargs` of rows.

    Args:
        tools: The run's tools; entries for other tools are not checked here.
    """

    def __init__(self, tools: Iterable[BaseTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._parameters: dict[tuple[str, str], _Parameters | None] = {}
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """Keys that look misspelled, but are no errors; each once."""
        return list(self._notes)

    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """Check the `tools_kwargs` of one row.

        Raises:
            DataError: for an unknown key in the entry of a tool, for a keyword that the tool's
                method does not accept, and for a required keyword that is missing.
        """
        for name, given in tools_kwargs.items():
            if not _has_known_shape(given):
                ToolKwargs.of(name, given)
            if name in self._tools and given:
                for field, kwargs in given.items():
                    self._check_method(name, field, kwargs or {})

    def _check_method(self, name: str, field: str, kwargs: Mapping[str, Any]) -> None:
        if (name, field) not in self._parameters:
            self._parameters[name, field] = _parameters_of(self._tools[name], field)
        takes = self._parameters[name, field]
        if takes is None:
            return
        key, method = f"extra_info.tools_kwargs.{name}.{field}", field.removesuffix(_KWARGS)
        unknown = [keyword for keyword in kwargs if keyword not in takes.names]
        for keyword in unknown:
            free = [other for other in takes.names if other not in kwargs]
            guess = did_you_mean(keyword, free, cutoff=_NEAR)
            if not takes.takes_any:
                raise DataError(
                    f"{method} of the tool {name!r} takes no {keyword!r}{guess}",
                    key=f"{key}.{keyword}",
                    expected=f"one of {', '.join(takes.names)}" if takes.names else "no keys",
                )
            if guess:
                note = f"{key}.{keyword} is no parameter of {method}, which takes it by **kwargs"
                self._notes[f"{note}{guess}"] = None
        if missing := [keyword for keyword in takes.required if keyword not in kwargs]:
            raise DataError(
                f"{method} of the tool {name!r} needs {missing[0]!r}, and the row has none",
                key=f"{key}.{missing[0]}",
                expected=f"a mapping with {', '.join(takes.required)}",
            )


def _has_known_shape(given: Any) -> bool:
    if not given or not isinstance(given, Mapping):
        return not given
    entry = cast("Mapping[str, Any]", given)
    values = entry.values()
    return entry.keys() <= _FIELDS and all(v is None or isinstance(v, Mapping) for v in values)


def _parameters_of(tool: BaseTool, field: str) -> _Parameters | None:
    """Read a method's signature; None if it does not show which keywords the method accepts."""
    method = getattr(tool, field.removesuffix(_KWARGS))
    # The id, and for `execute` the call's arguments, are passed by position.
    num_given = 2 if field == "execute_kwargs" else 1
    if isinstance(tool, FunctionTool) and field == "execute_kwargs":
        method, num_given = tool.function, 0
    if field == "create_kwargs" and field in create_arguments(method, {}):
        return None  # it gets the whole mapping
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except ValueError:  # it is written in C
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    named = [
        p for p in parameters[num_given:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    # The arguments of a function tool come from the policy's call.
    required = [p.name for p in named if p.default is p.empty] if num_given else []
    return _Parameters(
        names=tuple(p.name for p in named),
        required=tuple(required),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
