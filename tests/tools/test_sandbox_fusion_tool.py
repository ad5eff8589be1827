"""The tool that runs programs on a service, and a YAML that was written for verl's."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.messages import CallOutcome
from agentrl.tools import initialize_tools_from_config
from agentrl.tools.runtime.instance import ToolInstance, ToolKwargs
from agentrl.tools.sandbox_fusion_tool import SandboxFusionTool
from tests.fakes.sandbox_fusion import FakeFusion, fusion_service
from tests.fakes.tools import call

OF_VERL = """
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config:
      sandbox_fusion_url: "{url}"
      num_workers: 10
      enable_global_rate_limit: true
      rate_limit: 4
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 1024
      type: native
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code: {{type: "string", description: "The code to execute."}}
          required: ["code"]
"""


async def said(service: FakeFusion, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    tool = SandboxFusionTool({"sandbox_fusion_url": service.url, **(config or {})})
    one = ToolInstance(tool, instance_id="r", kwargs=ToolKwargs(), timeout_s=10)
    await one.create()
    outcome = await one.execute(call("code_interpreter", **arguments))
    await one.release()
    await tool.shutdown()
    await tool.shutdown()
    return outcome


async def test_a_program_is_run_and_its_end_is_reported():
    async with fusion_service() as service:
        fine = await said(service, code="```python\nprint(6 * 7)\n```")
        wrong = await said(service, code="1 / 0")
        late = await said(service, {"default_timeout": 0.3}, code="while 1: pass", timeout=99)
    assert (fine.response.text, fine.metrics["end"]) == ("42", "ok")
    assert "ZeroDivisionError" in wrong.response.text
    assert (wrong.outcome, wrong.metrics["end"]) == (CallOutcome.OK, "error")
    assert "time was up" in late.response.text
    assert [asked["run_timeout"] for asked in service.asked] == [30.0, 30.0, 0.3]
    assert service.asked[0]["memory_limit_MB"] == 1024
    assert service.asked[0]["language"] == "python"


@pytest.mark.parametrize("mode", ["500", "nonsense", "sandbox_error"])
async def test_a_service_that_fails_is_a_crash_of_the_tool(mode: str):
    async with fusion_service(mode) as service:
        outcome = await said(service, code="print(1)")
    assert outcome.outcome is CallOutcome.CRASHED
    assert service.url in outcome.message
    assert service.url not in outcome.response.text


async def test_a_file_that_was_written_for_verl_loads(tmp_path: Path):
    async with fusion_service() as service:
        file = tmp_path / "tools.yaml"
        file.write_text(OF_VERL.format(url=service.url + "/run_code"))
        (tool,) = initialize_tools_from_config(file)
        assert isinstance(tool, SandboxFusionTool)
        result = await tool.execute("r", {"code": "print(1)", "language": "python"})
        await tool.shutdown()
    assert result.response.text == "1\n"
    # There it bounds calls at work; here, for every other tool, calls begun in a second.
    assert tool.config["max_concurrency"] == 4
    assert "rate_limit" not in tool.config
    again = pickle.loads(pickle.dumps(tool))
    assert again.config == tool.config


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "sandbox_fusion_url"),
        ({"sandbox_fusion_url": ""}, "sandbox_fusion_url"),
        ({"sandbox_fusion_url": "http://x", "num_workers": 0}, "num_workers"),
        ({"sandbox_fusion_url": "http://x", "default_timeout": -1}, "default_timeout"),
    ],
)
def test_a_wrong_key_is_named(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as error:
        SandboxFusionTool(config)
    assert error.value.details["key"] == f"config.{key}"
