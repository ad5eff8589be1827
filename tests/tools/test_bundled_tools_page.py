"""The page on bundled tools says what is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import Section
from agentrl.tools.delegate_tool import DelegateToolConfig
from agentrl.tools.http_tool import HttpToolConfig
from agentrl.tools.mcp.servers import McpSection
from agentrl.tools.python_tool import PythonTool, PythonToolConfig
from agentrl.tools.registry import ToolEntry
from agentrl.tools.sandbox_fusion_tool import SandboxFusionToolConfig
from agentrl.tools.sandbox_tool import SandboxToolConfig
from agentrl.tools.search_tool import SearchConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs/tool_config"
PAGE = (ROOT / "docs/bundled_tools.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("Tools of MCP servers", McpSection),
        ("Search", SearchConfig),
        ("An HTTP endpoint", HttpToolConfig),
        ("Python", PythonToolConfig),
        ("Shell", SandboxToolConfig),
        ("Programs on a SandboxFusion service", SandboxFusionToolConfig),
        ("Sub-agents", DelegateToolConfig),
        ("The keys of the sandbox", SandboxConfig),
    ],
)
def test_every_key_is_in_the_table_and_no_other(section: str, model: type[Section]):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", SECTIONS[section], re.M)
    assert [key for key, _ in rows] == list(model.model_fields)
    for key, shown in rows:
        default: Any = model.model_fields[key].default
        if isinstance(default, bool):
            assert shown == str(default).lower()
        elif isinstance(default, int | float):
            assert float(shown) == default
        if isinstance(default, str) and default:
            assert shown == f"`{default}`"


@pytest.mark.parametrize(
    ("section", "file"),
    [
        ("Python", "python_tool"),
        ("Shell", "bash_tool"),
        ("Programs on a SandboxFusion service", "sandbox_fusion_tool"),
    ],
)
def test_shown_yaml_is_in_the_shipped_file(section: str, file: str):
    [block] = re.findall(r"^```yaml\n(.*?)^```", SECTIONS[section], re.M | re.S)
    [shown] = yaml.safe_load(block)["tools"]
    shipped = yaml.safe_load((CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
    [entry] = shipped["tools"]
    assert shown["class_name"] == entry["class_name"]
    assert shown["config"].items() <= entry["config"].items()


async def test_the_model_reads_the_traceback_that_is_shown():
    tool = PythonTool({})
    await tool.create("r")
    try:
        await tool.execute("r", {"code": "x = 0"})
        result = await tool.execute("r", {"code": "1 / x"})
    finally:
        await tool.release("r")
        await tool.shutdown()
    text = result.response.text
    assert text is not None
    assert text in SECTIONS["Python"]


def test_every_yaml_is_an_entry():
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S):
        for entry in yaml.safe_load(block)["tools"]:
            assert ToolEntry.model_validate(entry).class_name in PAGE
