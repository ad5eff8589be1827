# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
"""What runs inside the sandbox when code is graded: values as JSON, and how requests are answered.

This file is sent as text into the interpreter with the code (`guest_callee`) and into the one with
the asserts (`guest_asserter`), which share nothing; the host carries requests and answers between
them. Standard library only: nothing of agentrl can be imported there. It runs for every test, so
what takes time to import is imported where it is needed.

What the code's interpreter says is never believed to be more than data: values are rebuilt from
JSON on the other side, and an object that is no data stays behind a handle, which equals no data,
whatever its class says.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TextIO

    Json = Any

MAX_TEXT = 500
"""Characters of a message."""
MAX_COLLISIONS = 100
"""Keys of a mapping, or items of a set, that may have the hash of another one."""
MAX_DIGITS = 20_000
"""Hexadecimal digits of a numerator or denominator, which take quadratic time to reduce."""

_EXACT_INT = 2**53


def encode(value: Any, keep: Callable[[Any], Json]) -> Json:
    """Write a value as JSON; what is no plain data is what `keep` makes of it."""

    def items(values: Any) -> list[Json]:
        return [encode(item, keep) for item in values]

    match value:
        case None | bool() | str() | float():
            return value
        case int():
            return int(value) if abs(value) < _EXACT_INT else {"int": hex(value)}
        case list():
            return items(value)
        case tuple():
            return {"tuple": items(value)}
        case set():
            return {"set": items(value)}
        case frozenset():
            return {"frozenset": items(value)}
        case dict():
            return {"dict": [items(pair) for pair in value.items()]}
        case bytes() | bytearray():
            return {"bytes": bytes(value).hex()}
        case complex():
            return {"complex": [value.real, value.imag]}
        case _:
            return _encode_rarely(value, keep)


def decode(value: Json, handle: Callable[[int, str], Any]) -> Any:
    """Rebuild what `encode` wrote.

    The time that it takes is bounded by the length of the JSON text, whatever that says.

    Raises:
        ValueError: for what it cannot have written.
        TypeError: likewise.
        ArithmeticError: likewise.
        RecursionError: if it is nested too deeply.
    """
    if isinstance(value, list):
        return [decode(item, handle) for item in value]
    if not isinstance(value, dict):
        return value
    if "handle" in value:
        return handle(int(value["handle"]), str(value.get("type", "object")))
    ((tag, content),) = value.items()
    if tag not in _DECODERS:
        raise ValueError(f"no value: {tag!r}")
    return _DECODERS[tag](content, lambda item: decode(item, handle))


def _encode_rarely(value: Any, keep: Callable[[Any], Json]) -> Json:
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("decimal", "Decimal"):
        return {"Decimal": str(value)}
    if (kind.__module__, kind.__name__) == ("fractions", "Fraction"):
        return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), keep)
    return keep(value)


def _decimal(content: str, _: Any) -> Any:
    from decimal import Decimal

    return Decimal("".join(content))  # a text: it takes other things too


def _fraction(content: list[str], _: Any) -> Any:
    from fractions import Fraction

    # Never from a text: that of 1e999999999 is a number of a billion digits.
    if any(len(digits) > MAX_DIGITS for digits in content):
        raise ValueError("a fraction of too many digits")
    numerator, denominator = (int(digits, 16) for digits in content)
    return Fraction(numerator, denominator)


def _hashable(content: list[Any], item: Callable[[Any], Any]) -> list[Any]:
    """Decode keys; those that all have one hash take quadratic time to put into a mapping."""
    keys = [item(key) for key in content]
    if len(keys) - len({hash(key) for key in keys}) > MAX_COLLISIONS:
        raise ValueError("too many keys of one hash")
    return keys


def _mapping(content: list[Any], item: Callable[[Any], Any]) -> dict[Any, Any]:
    keys = _hashable([key for key, _ in content], item)
    return dict(zip(keys, (item(held) for _, held in content), strict=True))


_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda content, _: int(content, 16),
    "tuple": lambda content, item: tuple(map(item, content)),
    "set": lambda content, item: set(_hashable(content, item)),
    "frozenset": lambda content, item: frozenset(_hashable(content, item)),
    "dict": _mapping,
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "Decimal": _decimal,
    "Fraction": _fraction,
}


def answer_request(roles: Mapping[str, Callable[..., Any]], mark: str, request: str) -> None:
    """Do what the host asks, and print one line that begins with `mark`."""
    out = sys.stdout
    asked = json.loads(request)
    try:
        with redirect_stdout(_nowhere()):
            answer = {"value": roles[asked.pop("ask")](**asked)}
        line = json.dumps(answer)
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its answer
        line = json.dumps({"error": type(error).__name__, "message": _message(error)})
    print(f"\n{mark}{line}", file=out, flush=True)


@cache
def _nowhere() -> TextIO:
    """Open where goes what is printed on the way: it is no answer, and would use up its room.

    Never closed: code keeps `sys.stdout.write`, which it found when it was loaded.
    """
    return open(os.devnull, "w")


def _message(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except BaseException:  # noqa: BLE001 - its __str__ is code that is graded
        return ""
