"""The guest with the graded code: runs the code and answers requests. See `guest`."""

from __future__ import annotations

import itertools
import operator
import sys
from contextlib import suppress

from agentrl.sandbox.grading.guest import answer_request, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

    Json = Any

MAX_ITEMS = 100_000
"""Items to fetch from an iterable that is no data (for example a generator)."""


class Callee:
    """Holds the graded code and runs operations on it."""

    def __init__(self) -> None:
        self._module: ModuleType = type(sys)("solution")
        self._kept: list[Any] = []
        self._operations: dict[str, Callable[..., Any]] = {
            "await": _await,
            "bool": bool,
            "call": _call,
            "eq": operator.eq,
            "getattr": getattr,
            "getitem": operator.getitem,
            "len": len,
            "list": _first_items,
            "next": next,
            "setattr": setattr,
            "str": str,
        }

    def load(self, code: str) -> None:
        """Run the code as a module that is not the main one."""
        sys.modules["solution"] = self._module
        with suppress(SystemExit):  # the code ended itself
            exec(compile(code, "solution.py", "exec"), self._module.__dict__)

    def names(self, names: list[str]) -> Json:
        """Return those of the names that the code defines, with their values."""
        known: dict[str, Any] = vars(self._module)
        return self._write({name: known[name] for name in names if name in known})

    def function(self, name: str, args: Json) -> Json:
        """Call a function by name; a method of a class `Solution` counts as one."""
        known: dict[str, Any] = vars(self._module)
        found = known.get(name)
        if found is None and "Solution" in known:
            found = getattr(known["Solution"](), name)
        if found is None:
            raise NameError(f"name {name!r} is not defined")
        return self._write(found(*self._read(args)))

    def do(self, operation: str, args: Json) -> Json:
        """Run one operation on objects that are kept here, or on data."""
        return self._write(self._operations[operation](*self._read(args)))

    def _read(self, args: Json) -> Any:
        return decode(args, lambda index, _: self._kept[index])

    def _write(self, value: Any) -> Json:
        return encode(value, self._keep)

    def _keep(self, value: Any) -> Json:
        self._kept.append(value)
        return {"handle": len(self._kept) - 1, "type": type(value).__name__}


def _await(awaitable: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _first_items(values: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(values, MAX_ITEMS))


_CALLEE = Callee()
_ROLES: dict[str, Callable[..., Any]] = {
    "load": _CALLEE.load,
    "names": _CALLEE.names,
    "function": _CALLEE.function,
    "do": _CALLEE.do,
}


def serve(mark: str, request: str) -> None:
    """Answer one request of the host."""
    answer_request(_ROLES, mark, request)
