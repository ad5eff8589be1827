# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
"""The part that both guests of a test share: values as JSON, and answers to requests.

The host sends this file as text into the interpreter with the code (`guest_callee`) and into the
one with the asserts (`guest_asserter`). The two share nothing; the host carries requests and
answers between them. Use the standard library only: nothing of agentrl can be imported there. The
file runs for every test, so slow imports are inside the functions that need them.

What comes from the code's interpreter is only data: the other side rebuilds values from JSON. An
object that is no data becomes a handle. A handle equals no data, whatever its class defines.
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
"""Characters to keep of a message."""
MAX_COLLISIONS = 100
"""Keys of a mapping, or items of a set, that may share their hash with another one."""
MAX_DIGITS = 20_000
"""Hexadecimal digits of a numerator or denominator. To reduce them takes quadratic time."""

_EXACT_INT = 2**53


def encode(value: Any, keep: Callable[[Any], Json]) -> Json:
    """Encode a value as JSON; `keep` encodes what is no plain data."""

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
    """Rebuild a value that `encode` wrote.

    The length of the JSON text bounds the time, whatever the text contains.

    Raises:
        ValueError: If `encode` cannot have written it.
        TypeError: If `encode` cannot have written it.
        ArithmeticError: If `encode` cannot have written it.
        RecursionError: If it is nested too deeply.
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

    return Decimal("".join(content))  # `join` refuses what is no text


def _fraction(content: list[str], _: Any) -> Any:
    from fractions import Fraction

    # Never from a text: 1e999999999 would be a number of a billion digits.
    if any(len(digits) > MAX_DIGITS for digits in content):
        raise ValueError("a fraction of too many digits")
    numerator, denominator = (int(digits, 16) for digits in content)
    return Fraction(numerator, denominator)


def _hashable(content: list[Any], item: Callable[[Any], Any]) -> list[Any]:
    """Decode keys. Keys with equal hashes take quadratic time to put into a mapping."""
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
    """Run the host's request and print the answer on one line that begins with `mark`."""
    out = sys.stdout
    asked = json.loads(request)
    try:
        with redirect_stdout(_null_output()):
            answer = {"value": roles[asked.pop("ask")](**asked)}
        line = json.dumps(answer)
    except BaseException as error:  # noqa: BLE001 - an error is an answer too
        line = json.dumps({"error": type(error).__name__, "message": _message(error)})
    print(f"\n{mark}{line}", file=out, flush=True)


@cache
def _null_output() -> TextIO:
    """Open a file for what the code prints: it would use up the bytes of the answer.

    It is never closed: code may keep the `sys.stdout.write` that it found when it was loaded.
    """
    return open(os.devnull, "w")


def _message(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except BaseException:  # noqa: BLE001 - its __str__ is code that is graded
        return ""
