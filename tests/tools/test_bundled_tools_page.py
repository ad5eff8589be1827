"""The page on bundled tools says what is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config.section import Section
from agentrl.tools.http_tool import HttpToolConfig
from agentrl.tools.mcp.servers import McpSection
from agentrl.tools.registry import ToolEntry
from agentrl.tools.search_tool import SearchConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/bundled_tools.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("Tools of MCP servers", McpSection),
        ("Search", SearchConfig),
        ("An HTTP endpoint", HttpToolConfig),
    ],
)
def test_every_key_stands_in_the_table_and_no_other(section: str, model: type[Section]):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", SECTIONS[section], re.M)
    assert [key for key, _ in rows] == list(model.model_fields)
    for key, shown in rows:
        default: Any = model.model_fields[key].default
        if isinstance(default, int | float):
            assert float(shown) == default
        if isinstance(default, str) and default:
            assert shown == f"`{default}`"


def test_every_yaml_is_an_entry():
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S):
        for entry in yaml.safe_load(block)["tools"]:
            assert ToolEntry.model_validate(entry).class_name in PAGE
