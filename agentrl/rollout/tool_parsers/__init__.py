"""Formats of tool calls: find the calls in the text of a turn.

`hermes`, `qwen3_coder`, `llama3_json`, `mistral`, `pythonic` and `harmony` are the formats of
today's models; `json`, `python_block` and `search_r1` are those of earlier systems. `sglang:NAME`
is any parser of the installed SGLang.
"""

from agentrl.rollout.tool_parsers.base import (
    Call,
    MalformedCall,
    ParsedCall,
    ParsedTurn,
    Piece,
    Problem,
    ToolParser,
)
from agentrl.rollout.tool_parsers.harmony import HarmonyParser
from agentrl.rollout.tool_parsers.json_calls import HermesParser, JsonParser, Llama3JsonParser
from agentrl.rollout.tool_parsers.mistral import MistralParser
from agentrl.rollout.tool_parsers.plain_text import PythonBlockParser, SearchR1Parser
from agentrl.rollout.tool_parsers.pythonic import PythonicParser
from agentrl.rollout.tool_parsers.qwen3_coder import Qwen3CoderParser
from agentrl.rollout.tool_parsers.registry import (
    expected_formats,
    get_tool_parser,
    register_tool_parser,
    register_tool_parser_family,
    tool_parser_names,
)
from agentrl.rollout.tool_parsers.sglang_format import DetectorParser

__all__ = [
    "Call",
    "DetectorParser",
    "HarmonyParser",
    "HermesParser",
    "JsonParser",
    "Llama3JsonParser",
    "MalformedCall",
    "MistralParser",
    "ParsedCall",
    "ParsedTurn",
    "Piece",
    "Problem",
    "PythonBlockParser",
    "PythonicParser",
    "Qwen3CoderParser",
    "SearchR1Parser",
    "ToolParser",
    "expected_formats",
    "get_tool_parser",
    "register_tool_parser",
    "register_tool_parser_family",
    "tool_parser_names",
]
