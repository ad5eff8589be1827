"""The format `qwen3_coder`: a call in tags, its values typed by the tool's schema."""

import re
from collections.abc import Collection
from typing import Any

from agentrl.rollout.argument_schemas import property_types
from agentrl.rollout.tool_parsers.base import Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.json_calls import decode_json
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_NAME = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>|</tool_call>")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")


@register_tool_parser("qwen3_coder")
class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    A value is a string if the schema says so. Otherwise it is JSON, or a string if it is not JSON.
    """

    opener = r"<tool_call>|(?=<function=)"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read one function; the tag around it may be missing."""
        head = _NAME.match(text, body)
        if head is None:
            return _malformed(text, body, "there is no <function=NAME> in it", "")
        name, position = head[1], head.end()
        types = next((property_types(t.function.parameters) for t in tools if t.name == name), {})
        names = "|".join(map(re.escape, [*types, name]))
        unclosed = re.compile(rf"<(?:parameter|function)=(?:{names})>")
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, position):
            key, end = parameter[1], _VALUE_END.search(text, parameter.end())
            # Stop at the call's end: otherwise many unclosed calls take quadratic time.
            if end is None or end[0] == "</tool_call>":
                reason = f"the parameter {key} is not closed by </parameter>"
                return _malformed(text, body, reason, name)
            if key in arguments:
                return _malformed(text, body, f"the parameter {key} is there twice", name)
            raw = text[parameter.end() : end.start()]
            if unclosed.search(raw):
                reason = f"the parameter {key} is not closed by </parameter> before the next one"
                return _malformed(text, body, reason, name)
            arguments[key] = typed(raw, types.get(key, frozenset()))
            position = end.end()
        closed = _FUNCTION_END.match(text, position)
        if closed is None:
            return _malformed(text, body, "the function is not closed by </function>", name)
        outer = _CALL_END.match(text, closed.end()) if body > start else None
        return Piece((outer or closed).end(), (Call(name, arguments),))


def typed(raw: str, types: Collection[str]) -> Any:
    """Convert a value to one of the types that its JSON Schema allows.

    Example:
        >>> typed("42", {"string"}), typed("42", {"integer"}), typed("True", {})
        ('42', 42, True)
    """
    types = set(types)
    if types == {"string"}:
        return raw
    text = {"True": "true", "False": "false", "None": "null"}.get(raw.strip(), raw)
    decoded = decode_json(text)
    if decoded.reason is not None or text[decoded.end :].strip():
        return raw
    if "string" in types and not _fits(decoded.value, types):
        return raw
    return decoded.value


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def _fits(value: Any, types: set[str]) -> bool:
    """Whether a decoded value has one of the types; JSON's `true` is not a number."""
    wanted = types & {"boolean"} if isinstance(value, bool) else types
    return any(isinstance(value, _PYTHON_TYPES[name]) for name in wanted if name in _PYTHON_TYPES)


def _malformed(text: str, body: int, reason: str, name: str) -> Piece:
    close = text.find("</tool_call>", body)
    end = len(text) if close < 0 else close + len("</tool_call>")
    return Piece(end, (Problem(reason, name),))
