"""Formats of earlier systems, in which a call is a piece of plain text."""

from agentrl.rollout.tool_parsers.base import Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_FENCE = "```"
_EMPTY_QUERY = Problem("the query is empty", "search")


@register_tool_parser("python_block")
class PythonBlockParser(ToolParser):
    """A fenced block of Python is a call of the tool that runs code.

    That is the tool `tool` where the run has it, else the run's only tool; the code is its
    parameter `parameter`, or its only one.
    """

    opener = r"```(?:python|py)[ \t]*\n"

    def __init__(self, tool: str = "code_interpreter", parameter: str = "code") -> None:
        self._tool = tool
        self._parameter = parameter

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read up to the fence that closes the block, at the beginning of a line."""
        close = text.find(f"\n{_FENCE}", body - 1)
        if close < 0:
            return Piece(len(text), (Problem(f"the code is not closed by {_FENCE}", self._tool),))
        code = text[body : max(close, body)]
        return Piece(close + 1 + len(_FENCE), (self._call(code, tools),))

    def _call(self, code: str, tools: Tools) -> Call:
        by_name = {tool.name: tool for tool in tools}
        tool = by_name.get(self._tool, tools[0] if len(tools) == 1 else None)
        if tool is None:
            return Call(self._tool, {self._parameter: code})
        names = list(tool.function.parameters.get("properties", {}))
        only = names[0] if len(names) == 1 else self._parameter
        return Call(tool.name, {only: code})


@register_tool_parser("search_r1")
class SearchR1Parser(ToolParser):
    """`<search>query</search>` calls the tool `search`; `<information>` answers it.

    The answer is a user message, since the policy was never told of a tool.
    """

    opener = "<search>"
    result_role = "user"
    _closer = "</search>"

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read one query."""
        close = text.find(self._closer, body)
        if close < 0:
            problem = Problem(f"the query is not closed by {self._closer}", "search")
            return Piece(len(text), (problem,))
        query = text[body:close].strip()
        found = Call("search", {"query": query}) if query else _EMPTY_QUERY
        return Piece(close + len(self._closer), (found,))

    def render_result(self, text: str) -> str:
        """Word a result as the policy expects it."""
        return f"<information>{text}</information>"
