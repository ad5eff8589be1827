"""Formats of plain text call the bundled tools, or are refused before a run."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.tool_calls import check_calls
from agentrl.rollout.tool_parsers import get_tool_parser, tool_parser_names
from agentrl.tools.from_verl import as_verl_shows
from agentrl.tools.python_tool import PythonTool
from agentrl.tools.sandbox_fusion_tool import SandboxFusionTool
from agentrl.tools.search_tool import SearchTool
from tests.fakes.tools import schema

PYTHON: Any = PythonTool.default_schema
FUSION: Any = SandboxFusionTool.default_schema
SEARCH: Any = SearchTool.default_schema

OTHER = schema("other", a={"type": "string"}, b={"type": "string"})
CODE, ASKED = "```python\nprint(1)\n```", "<search>Bern</search>"


@pytest.mark.parametrize(
    ("name", "text", "tools", "call"),
    [
        ("search_r1", ASKED, [SEARCH], ("search", {"query_list": ["Bern"]})),
        (
            "search_r1",
            ASKED,
            [OTHER, as_verl_shows(SEARCH, "verl_sync")],
            ("search", {"query_list": ["Bern"]}),
        ),
        (
            "search_r1",
            ASKED,
            [schema("search", query={"type": "string"})],
            ("search", {"query": "Bern"}),
        ),
        ("python_block", CODE, [PYTHON], ("python", {"code": "print(1)"})),
        ("python_block", CODE, [OTHER, PYTHON], ("python", {"code": "print(1)"})),
        ("python_block", CODE, [PYTHON, FUSION], ("code_interpreter", {"code": "print(1)"})),
    ],
)
def test_a_call_fits_the_bundled_tool(
    name: str,
    text: str,
    tools: list[OpenAIFunctionToolSchema],
    call: tuple[str, dict[str, object]],
):
    parser = get_tool_parser(name)
    parser.check_tools(tools)
    checked = check_calls(parser.parse(text, tools=tools), tools)
    assert [(one.name, one.arguments) for one in checked.calls] == [call]


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("search_r1", [OTHER], "cannot call the tool 'other'"),
        ("search_r1", [PYTHON, FUSION], "cannot call tools python, code_interpreter"),
        ("python_block", [SEARCH, OTHER], "cannot call tools search, other"),
    ],
)
def test_tools_that_a_format_cannot_call_are_an_error(
    name: str, tools: list[OpenAIFunctionToolSchema], message: str
):
    with pytest.raises(ConfigError, match=message) as caught:
        get_tool_parser(name).check_tools(tools)
    assert caught.value.details["key"] == "rollout.multi_turn.format"


def test_the_page_lists_every_format():
    page = (Path(__file__).parents[3] / "docs/tools.md").read_text(encoding="utf-8")
    listed = page.partition("## Formats of calls")[2].partition("\n## ")[0]
    bundled = [name for name in tool_parser_names() if not name.startswith("test_")]
    for name in bundled:
        assert f"| `{name.partition(':')[0]}" in listed, name
