"""The format `harmony` of gpt-oss: a call is a message to a tool."""

import re
from collections.abc import Collection

from agentrl.rollout.tool_parsers.base import Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.json_calls import decode_json, read_arguments
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_MESSAGE, _CALL = "<|message|>", "<|call|>"
_RECIPIENT = re.compile(r"\s*(?:<\|channel\|>\s*\w*\s+)?to=([^\s<]*)")
_HEADER = re.compile(
    r"\s*(?:to=[^\s<]+(?:\s*<\|channel\|>\s*\w+)?|<\|channel\|>\s*\w+\s+to=[^\s<]+)"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_CLOSER = re.compile(r"\s*<\|call\|>")
_END = re.compile(r"<\|(?:end|return)\|>")


@register_tool_parser("harmony")
class HarmonyParser(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may also precede the channel, which may be another one. Messages without a
    recipient are text as a whole, whatever they quote.
    """

    opener = r"(?:<\|start\|>|\A(?!\Z)|(?=<\|channel\|>))(?:[^<]|<\|(?:channel|constrain)\|>)*+"

    @property
    def closers(self) -> Collection[str]:
        """See `ToolParser.closers`."""
        return (_CALL,)

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read one message; the opener matches its header."""
        header = text[start:body].removeprefix("<|start|>").removeprefix("assistant")
        has_content = text.startswith(_MESSAGE, body)
        content = body + len(_MESSAGE) if has_content else body
        recipient = _RECIPIENT.match(header)
        if recipient is None:
            if has_content and ("to=" in header or "<|constrain|>" in header):
                return _malformed(text, content, "its header cannot be read", "")
            end = _END.search(text, content) if has_content else None
            return Piece(end.end() if end else len(text) if has_content else body, ())
        name = recipient[1].removeprefix("functions.")
        if not has_content or not _HEADER.fullmatch(header):
            return _malformed(text, content, "its header cannot be read", name)
        if closed := _CLOSER.match(text, content):
            return Piece(closed.end(), (Call(name, {}),))
        decoded = decode_json(text, content)
        if decoded.reason is not None:
            return _malformed(text, content, f"its arguments: {decoded.reason}", name)
        if closed := _CLOSER.match(text, decoded.end):
            return Piece(closed.end(), (read_arguments(name, decoded.value),))
        return _malformed(text, content, "there is text after its arguments", name)


def _malformed(text: str, content: int, reason: str, name: str) -> Piece:
    end = text.find(_CALL, content)
    if end < 0:
        return Piece(len(text), (Problem(f"it is not closed by {_CALL}", name),))
    return Piece(end + len(_CALL), (Problem(reason, name),))
