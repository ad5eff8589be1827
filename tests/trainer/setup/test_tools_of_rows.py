"""What is said of rows and tools before a run begins."""

from typing import Any

from agentrl.data.dataset import PromptDataset
from agentrl.tools import BaseTool
from agentrl.trainer.setup.datasets import note_tools
from tests.fakes.plugins import make_prompts
from tests.fakes.tools import FlakyTool


def rows(*prompts: dict[str, Any]) -> PromptDataset:
    return PromptDataset(prompt for fields in prompts for prompt in make_prompts(1, **fields))


TOOLS: list[BaseTool] = [FlakyTool("calc")]
WITH = {"tools_kwargs": {"calc": {}}}


def test_rows_that_fit_the_tools_of_the_run_are_passed_over():
    assert list(note_tools(rows(WITH, {}), TOOLS, "all")) == []
    assert list(note_tools(rows(WITH, {"tool_selection": []}), TOOLS, "tools_kwargs")) == []
    assert list(note_tools(rows({}), [], "tools_kwargs")) == []


def test_rows_with_tools_in_a_run_without_tools_are_reported():
    (note,) = note_tools(rows(WITH), [], "tools_kwargs")
    assert "rows name the tools calc, and the run has none" in note


def test_rows_that_are_shown_no_tool_are_counted():
    (note,) = note_tools(rows(WITH, {}, {}), TOOLS, "tools_kwargs")
    assert note.startswith("2 of 3 rows have no tools_kwargs and are shown no tool")


def test_rows_that_need_tools_kwargs_and_have_none_are_counted():
    (note,) = note_tools(rows({"extra_info": {"need_tools_kwargs": True}}), TOOLS, "all")
    assert note == "1 row with need_tools_kwargs and no tools_kwargs"
