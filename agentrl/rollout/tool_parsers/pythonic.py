"""The format `pythonic`: calls as a Python list, read by `ast` and never evaluated."""

import ast
import json
import re
import warnings
from typing import Any

from agentrl.rollout.tool_parsers.base import (
    AFTER_THOUGHT,
    Call,
    Piece,
    Problem,
    ToolParser,
    Tools,
)
from agentrl.rollout.tool_parsers.json_calls import find_closing, unique_keys
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_QUOTE_OR_BRACKET = re.compile(r"""\\.|'''|\"\"\"|['"\[\](){}]""", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


@register_tool_parser("pythonic")
class PythonicParser(ToolParser):
    """`[search(query="Bern"), add(a=1, b=2)]` at the start of the turn, or after a thought.

    Values are Python literals; JSON's `true`, `false` and `null` are accepted too. Values without a
    name are assigned to the tool's parameters in order.
    """

    opener = rf"(?:<\|python_start\|>\s*|(?:\A|{AFTER_THOUGHT})\s*)(?=\[\s*[A-Za-z_][\w.]*\()"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read the list up to its closing bracket."""
        end = find_closing(text, body, _QUOTE_OR_BRACKET)
        if end is None:
            return Piece(len(text), (Problem("the list of calls is not closed by ]"),))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text[body:end], mode="eval").body
            items = tree.elts if isinstance(tree, ast.List) else [tree]
            return Piece(end, tuple(_call(item, tools) for item in items))
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            return Piece(end, (Problem(f"it is not a Python list of calls: {error}"),))


def _call(node: ast.expr, tools: Tools) -> Call | Problem:
    if not isinstance(node, ast.Call):
        return Problem("the list holds something that is no call")
    name = ast.unparse(node.func)
    arguments: dict[str, Any] = {}
    schemas = (tool.function.parameters for tool in tools if tool.name == name)
    names = list(next(schemas, {}).get("properties", {}))
    if len(node.args) > len(names):
        return Problem("an argument has no name; write name=value", name)
    named = [*zip(names, node.args, strict=False), *((k.arg, k.value) for k in node.keywords)]
    for key, value in named:
        if key is None or key in arguments:
            return Problem("an argument is given twice, or as **value", name)
        try:
            arguments[key] = _literal(value)
        except (ValueError, TypeError, RecursionError):
            return Problem(f"the argument {key} is not a literal", name)
    return Call(name, arguments)


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal to a JSON value.

    Raises:
        ValueError: for what is not a literal, or not JSON (sets, bytes, infinities, a key twice).
    """
    plain = _JsonNames().visit(node)
    for inner in ast.walk(plain):
        if isinstance(inner, ast.Dict):
            unique_keys([(ast.unparse(key), None) for key in inner.keys if key is not None])
    value = ast.literal_eval(plain)
    written = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return json.loads(written, object_pairs_hook=unique_keys)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
