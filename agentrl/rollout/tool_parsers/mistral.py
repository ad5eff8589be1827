"""The format `mistral`: calls after `[TOOL_CALLS]`, in the two forms of Mistral's models."""

import re
from typing import Any, cast

from agentrl.rollout.tool_parsers.base import Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.json_calls import call_of, decode_json, read_arguments
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_OPENER = "[TOOL_CALLS]"
_LIST = re.compile(r"\s*(?=[\[{])")
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]*))?\[ARGS\]")
_ID = re.compile(r"[A-Za-z0-9]{9}")
"""An id of a call that the templates accept."""


@register_tool_parser("mistral")
class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}`.

    A call may have an id, as a field of the object or as `[CALL_ID]ID` after the name. The result
    refers to that id.
    """

    opener = re.escape(_OPENER)

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read a list of calls, or one call by its name."""
        if listed := _LIST.match(text, body):
            decoded = decode_json(text, listed.end())
            if decoded.reason is not None:
                return _malformed(text, decoded.end, decoded.reason, "")
            is_list = text[listed.end()] == "["
            items = cast("list[Any]", decoded.value if is_list else [decoded.value])
            found = [_with_id(call_of(item), _field(item, "id")) for item in items]
            return Piece(decoded.end, tuple(found) or (Problem("the list of calls is empty"),))
        named = _NAMED.match(text, body)
        if named is None:
            return _malformed(text, body, "there is no list of calls and no NAME[ARGS] in it", "")
        decoded = decode_json(text, named.end())
        if decoded.reason is not None:
            return _malformed(text, decoded.end, f"its arguments: {decoded.reason}", named[1])
        found = _with_id(read_arguments(named[1], decoded.value), named[2])
        return Piece(decoded.end, (found,))


def _with_id(found: Call | Problem, given: Any) -> Call | Problem:
    is_id = isinstance(given, str) and _ID.fullmatch(given)
    return found._replace(id=given) if isinstance(found, Call) and is_id else found


def _field(item: Any, name: str) -> Any:
    return cast("dict[str, Any]", item).get(name) if isinstance(item, dict) else None


def _malformed(text: str, body: int, reason: str, name: str) -> Piece:
    following = text.find(_OPENER, body)
    return Piece(len(text) if following < 0 else following, (Problem(reason, name),))
