"""Formats of earlier systems, in which a call is a piece of plain text."""

import re
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.tool_parsers.base import Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.registry import register_tool_parser

_FENCE = "```"
_FENCE_LINE = re.compile(rf"\n{_FENCE}(\w*)")
_EMPTY_QUERY = Problem("the query is empty", "search")


@dataclass(frozen=True, slots=True)
class _Target:
    """The tool that every call of a format means, and the parameter that takes the text.

    The tool is the first of `names` that the run has, else its only tool. The parameter is
    `parameter`, else the tool's only one. A parameter that is a list gets a list of one text.
    """

    names: tuple[str, ...]
    parameter: str

    def call(self, text: str, tools: Tools) -> Call:
        """Make a call with a text."""
        tool = self.find(tools)
        name = self._parameter_of(tool) if tool else None
        if tool is None or name is None:
            return Call(tool.name if tool else self.names[0], {self.parameter: text})
        schema: Any = tool.function.parameters["properties"][name]
        takes_list = isinstance(schema, dict) and schema.get("type") == "array"  # pyright: ignore
        return Call(tool.name, {name: [text] if takes_list else text})

    def check(self, tools: Tools, format: str) -> None:
        """Check that a run has the tool and the parameter.

        Raises:
            ConfigError: if it does not.
        """
        tool = self.find(tools)
        if not tools or (tool and self._parameter_of(tool)):
            return
        has = f"the tool {tool.name!r}" if tool else f"tools {', '.join(t.name for t in tools)}"
        raise ConfigError(
            f"the format {format} cannot call {has}",
            key="rollout.multi_turn.format",
            expected=f"a tool {' or '.join(self.names)}, or one tool alone, with a parameter "
            f"{self.parameter}, or one parameter alone",
        )

    def find(self, tools: Tools) -> OpenAIFunctionToolSchema | None:
        """Find the tool."""
        by_name = {tool.name: tool for tool in tools}
        named = (by_name[name] for name in self.names if name in by_name)
        return next(named, tools[0] if len(tools) == 1 else None)

    def _parameter_of(self, tool: OpenAIFunctionToolSchema) -> str | None:
        names = list(tool.function.parameters.get("properties", {}))
        if self.parameter in names:
            return self.parameter
        return names[0] if len(names) == 1 else None


@register_tool_parser("python_block")
class PythonBlockParser(ToolParser):
    """A fenced block of Python is a call of the tool that runs code.

    The tool is `code_interpreter` or `python` if the run has it, else the run's only tool. The code
    is its parameter `code`, or its only one.
    """

    opener = r"```(?:python|py)[ \t]*\n"

    def __init__(self, tool: str | None = None, parameter: str = "code") -> None:
        self._target = _Target((tool,) if tool else ("code_interpreter", "python"), parameter)

    def check_tools(self, tools: Tools) -> None:
        """See `ToolParser.check_tools`."""
        self._target.check(tools, "python_block")

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read up to the fence that closes the block, at the start of a line."""
        close = _FENCE_LINE.search(text, body - 1)
        if close is None or close[1]:  # the next block starts
            tool = self._target.find(tools)
            name = tool.name if tool else self._target.names[0]
            end = close.start() + 1 if close else len(text)
            return Piece(end, (Problem(f"the code is not closed by {_FENCE}", name),))
        code = text[body : max(close.start(), body)]
        return Piece(close.end(), (self._target.call(code, tools),))


@register_tool_parser("search_r1")
class SearchR1Parser(ToolParser):
    """`<search>query</search>` calls the tool that searches; `<information>` answers it.

    The tool is `search` if the run has it, else the run's only tool. The query is its parameter
    `query`, or its only one. The answer is a user message, because the prompt names no tools.
    """

    opener = "<search>"
    result_role = "user"
    _closer = "</search>"
    _target = _Target(("search",), "query")

    def check_tools(self, tools: Tools) -> None:
        """See `ToolParser.check_tools`."""
        self._target.check(tools, "search_r1")

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read one query."""
        close = text.find(self._closer, body)
        if close < 0:
            problem = Problem(f"the query is not closed by {self._closer}", "search")
            return Piece(len(text), (problem,))
        query = text[body:close].strip()
        found = self._target.call(query, tools) if query else _EMPTY_QUERY
        if self.opener in query:
            reason = f"the query is not closed by {self._closer} before the next one"
            found = Problem(reason, found.name)
        return Piece(close + len(self._closer), (found,))

    def render_result(self, text: str) -> str:
        """Return a result in the form that the policy expects."""
        return f"<information>{text}</information>"
