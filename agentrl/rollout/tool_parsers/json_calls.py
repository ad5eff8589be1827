"""Formats that write a call as a JSON object: `hermes`, `llama3_json`, `json`."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from agentrl.rollout.tool_parsers.base import (
    AFTER_THOUGHT,
    Call,
    Piece,
    Problem,
    ToolParser,
    Tools,
)
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_FIRST_WINDOW = 1024
_LONGEST_WORD = 16
"""Characters after an error that the decoder may have read: `-Infinity`, an escape."""
_MARKS = re.compile(r'\\.|["\[\](){}]', re.DOTALL)
_AROUND = {"type", "function", "id", "index"}
_SAME = {"name", "function"}, {"arguments", "parameters"}
_INSIDE = set[str]().union(*_SAME)
_BLANK = re.compile(r"\s*")
_BLANK_OR_SEMICOLON = re.compile(r"[\s;]*")
CALL_SHAPED = r'(?=\{\s*"(?:name|type|function|arguments|parameters)"\s*:)'


@register_tool_parser("hermes")
class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 write it."""

    opener = "<tool_call>"
    _closer = "</tool_call>"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read the object, then the closing tag: a tag inside a string closes nothing."""
        decoded = decode_json(text, body)
        if decoded.reason is None:
            end = _skip(_BLANK, text, decoded.end)
            if text.startswith(self._closer, end):
                return Piece(end + len(self._closer), (call_of(decoded.value),))
        return self._malformed(text, body, decoded.reason)

    def _malformed(self, text: str, body: int, reason: str | None) -> Piece:
        close = text.find(self._closer, body)
        if close < 0:
            return Piece(len(text), (Problem(f"it is not closed by {self._closer}"),))
        reason = reason or "there is text after the JSON object"
        return Piece(close + len(self._closer), (Problem(reason),))


@register_tool_parser("json")
class JsonParser(ToolParser):
    """A bare object anywhere in the turn: `{"name": ..., "arguments": {...}}`."""

    opener = r'(?=\{\s*")'

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read the object. Nothing inside it is a call, also if it is broken or no call itself.

        A broken call takes the rest of the text: its end is unknown.
        """
        decoded = decode_json(text, body)
        if decoded.reason is not None:
            if re.compile(CALL_SHAPED).match(text, body):
                return Piece(len(text), (Problem(decoded.reason),))
            end = find_closing(text, body, _MARKS)
            if end is None and re.compile(CALL_SHAPED).search(text, body + 1):
                return Piece(len(text), (Problem("an object before it is not closed"),))
            return Piece(end or len(text), ())
        found = (call_of(decoded.value),) if _is_call_shaped(decoded.value) else ()
        return Piece(decoded.end, found)


@register_tool_parser("llama3_json")
class Llama3JsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole turn, or after `<|python_tag|>`.

    Several calls are separated by semicolons. Text after the last call is not a part of it.
    """

    opener = rf"<\|python_tag\|>|(?:\A|{AFTER_THOUGHT})\s*{CALL_SHAPED}"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read all objects."""
        found: list[Call | Problem] = []
        end = position = _skip(_BLANK, text, body)
        while text.startswith("{", position):
            decoded = decode_json(text, position)
            if decoded.reason is not None:
                return Piece(len(text), (*found, Problem(decoded.reason)))
            if _is_call_shaped(decoded.value):
                found.append(call_of(decoded.value))
            end = decoded.end
            position = _skip(_BLANK_OR_SEMICOLON, text, end)
        if not found and text.startswith("<|python_tag|>", start):
            return Piece(len(text), (Problem("there is no call after <|python_tag|>"),))
        return Piece(end, tuple(found))


class Decoded(NamedTuple):
    """A JSON value at the start of a text, or the reason why there is none."""

    value: Any
    end: int
    """The index after it, or that of the error; the end of the text if the value goes on there."""
    reason: str | None = None


def decode_json(text: str, start: int = 0) -> Decoded:
    """Decode the JSON value that starts at `start` (white space is skipped); raises nothing.

    The value is strict JSON: no constants such as `NaN`, no number that is infinite as a float, and
    no object that has a key twice.
    """
    start = _skip(_BLANK, text, start)
    try:
        value, end = _decode_in_windows(text, start)
    except RecursionError:
        return Decoded(None, start, "the JSON is nested too deeply")
    except ValueError as error:
        end = start
        if isinstance(error, json.JSONDecodeError):
            is_cut = "Unterminated" in error.msg or not text[start + error.pos :].strip()
            end = len(text) if is_cut else start + error.pos
        return Decoded(None, end, f"it is not valid JSON: {_first_line(error)}")
    if "\\u" in text[start:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Decoded(None, start, "it holds half of a surrogate pair")
    return Decoded(value, end)


def _decode_in_windows(text: str, start: int) -> tuple[Any, int]:
    """Decode a value from a window of the text that doubles until it is large enough.

    For each error, the library counts the lines of its whole input, so many errors in one long text
    would take quadratic time.
    """
    width = _FIRST_WINDOW
    while start + width < len(text):
        window = text[start : start + width]
        width *= 2
        try:
            value, end = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            is_cut = error.pos + _LONGEST_WORD > len(window) or "Unterminated" in error.msg
            if not is_cut:
                raise
        else:
            if end < len(window):  # a number could go on after the window
                return value, start + end
    value, end = _DECODER.raw_decode(text[start:])
    return value, start + end


def call_of(value: Any) -> Call | Problem:
    """Read a decoded object as a call: `name`, and `arguments` or `parameters`."""
    if not isinstance(value, dict):
        return Problem("it is not a JSON object")
    fields = cast("dict[str, Any]", value)
    is_nested = isinstance(fields.get("function"), dict)
    unread = fields.keys() - _AROUND if is_nested else fields.keys() - _AROUND - _INSIDE
    twice = next((pair for pair in _SAME if pair <= fields.keys()), ())
    name = fields.get("name", fields.get("function"))
    if unread or twice:
        reason = (
            f"it has the fields {', '.join(sorted(unread or twice))}, which are not those of a call"
        )
        return Problem(reason, name if isinstance(name, str) else "")
    if is_nested:
        return call_of(fields["function"])
    if not isinstance(name, str) or not name:
        return Problem('it has no "name"')
    arguments: Any = fields.get("arguments", fields.get("parameters", {}))
    return read_arguments(name, arguments)


def read_arguments(name: str, arguments: Any) -> Call | Problem:
    """Read the arguments of a call: an object, the text of one, or nothing.

    Args:
        name: The tool's name.
        arguments: A decoded value. None and a blank text mean no arguments.
    """
    if isinstance(arguments, str):
        arguments = arguments.strip() or None
    if isinstance(arguments, str):
        decoded = decode_json(arguments)
        if decoded.reason is not None:
            return Problem(f"its arguments: {decoded.reason}", name)
        if arguments[decoded.end :].strip():
            return Problem("there is text after the JSON object of its arguments", name)
        arguments = decoded.value
    if not isinstance(arguments, dict | None):
        return Problem('its "arguments" are not a JSON object', name)
    return Call(name, cast("dict[str, Any]", arguments or {}))


def _is_call_shaped(value: Any) -> bool:
    """Whether a bare object in the text is meant as a call, not as a plain answer."""
    fields = cast("dict[str, Any]", value)
    return isinstance(value, dict) and (
        isinstance(fields.get("function"), dict)
        or ("name" in fields and ("arguments" in fields or "parameters" in fields))
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs.

    Raises:
        ValueError: if a key occurs twice, because the intended value is unknown.
    """
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key[:40]!r} is there twice")
        made[key] = value
    return made


_DECODER = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=unique_keys
)


def find_closing(text: str, start: int, marks: re.Pattern[str]) -> int | None:
    """Find the end of the bracket that opens at `start`; brackets in strings do not count.

    Args:
        text: A text.
        start: Index of the bracket.
        marks: Matches brackets, quotes and escapes.
    """
    depth, quote = 0, ""
    for match in marks.finditer(text, start):
        mark = match[0]
        if quote:
            quote = "" if mark == quote else quote
        elif mark[0] in "'\"":
            quote = mark
        elif mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _skip(blank: re.Pattern[str], text: str, position: int) -> int:
    match = blank.match(text, position)
    return match.end() if match else position


def _first_line(error: ValueError) -> str:
    return str(error).partition("\n")[0]
