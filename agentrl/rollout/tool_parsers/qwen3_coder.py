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
_TAG = re.compile(r"<(/)?(?:(tool_call)|(function|parameter)(?(1)|=[^>\s]+))>")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")


@register_tool_parser("qwen3_coder")
class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    A value is a string if the schema says so. Otherwise it is JSON, or a string if it is not JSON.
    Tags of the format in a value are a part of it if each of them is closed in it.
    """

    opener = r"<tool_call>|(?=<function=)"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read the functions in a tag, or one function; the tag around it may be missing."""
        found: list[Call | Problem] = []
        position = body
        while not found or _NAME.match(text, position):
            one, position = _read_function(text, position, tools)
            found.append(one)
            if body == start or isinstance(one, Problem):
                break
        if isinstance(one := found[-1], Call) and body > start:
            end = _CALL_END.match(text, position)
            position = end.end() if end else position
            one = one if end else Problem("it is not closed by </tool_call>", one.name)
        if isinstance(one, Call):
            return Piece(position, tuple(found))
        close = text.find("</tool_call>", position)
        position = len(text) if close < 0 else close + len("</tool_call>")
        named = (item.name for item in found)
        return Piece(position, tuple(Problem(one.reason, name) for name in named))


def _read_function(text: str, position: int, tools: Tools) -> tuple[Call | Problem, int]:
    """Return a function and the index after it, or what is wrong and the index of it."""
    head = _NAME.match(text, position)
    if head is None:
        return Problem("there is no <function=NAME> in it"), position
    name, position = head[1], head.end()
    types = next((property_types(t.function.parameters) for t in tools if t.name == name), {})
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, position):
        key, (end, is_closed) = parameter[1], _value_end(text, parameter.end())
        if not is_closed:
            return Problem(f"the parameter {key} is not closed by </parameter>", name), end
        if key in arguments:
            return Problem(f"the parameter {key} is there twice", name), end
        raw = text[parameter.end() : end].removesuffix("\n")
        arguments[key] = typed(raw, types.get(key, frozenset()))
        position = end + len("</parameter>")
    closed = _FUNCTION_END.match(text, position)
    if closed is None:
        return Problem("the function is not closed by </function>", name), position
    return Call(name, arguments), closed.end()


def _value_end(text: str, position: int) -> tuple[int, bool]:
    """Return the index of the tag that ends a value, and whether it is the right one."""
    opened: list[str] = []
    for tag in _TAG.finditer(text, position):
        kind = tag[2] or tag[3]
        if not tag[1]:
            opened.append(kind)
        elif opened and opened[-1] == kind:
            opened.pop()
        else:
            return tag.start(), kind == "parameter" and not opened
    return len(text), False


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
