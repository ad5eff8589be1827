"""Every bundled tool knows its keys: an unknown key is an error or is reported."""

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.tools import BaseTool
from agentrl.tools.bash_tool import BashTool
from agentrl.tools.calculator_tool import CalculatorTool
from agentrl.tools.gsm8k_tool import Gsm8kTool
from agentrl.tools.python_tool import PythonTool
from agentrl.tools.sandbox_fusion_tool import SandboxFusionTool

SERVICE = {"sandbox_fusion_url": "http://127.0.0.1:9"}
TRUSTED = {"provider": "subprocess", "trusted": True}


@pytest.mark.parametrize(
    ("tool", "config", "wrong", "meant"),
    [
        (PythonTool, {}, "sandbx", "sandbox"),
        (PythonTool, {}, "echo_last_expresion", "echo_last_expression"),
        (BashTool, {}, "sandbx", "sandbox"),
        (SandboxFusionTool, SERVICE, "default_timout", "default_timeout"),
        (Gsm8kTool, {}, "repeat_penalti", "repeat_penalty"),
        (CalculatorTool, {}, "timeout", "timeout_s"),
    ],
)
def test_unused_keys_a_misspelt_key_is_refused_with_the_nearest(
    tool: type[BaseTool], config: dict[str, Any], wrong: str, meant: str
):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'") as error:
        tool({**config, wrong: 1})
    assert error.value.details["key"] == f"config.{wrong}"


@pytest.mark.parametrize("tool", [PythonTool, BashTool])
def test_unused_keys_a_sandbox_with_the_address_of_another_provider_is_refused(
    tool: type[BaseTool],
):
    with pytest.raises(ConfigError, match="sandbox_fusion"):
        tool({"sandbox": {"provider": "sandbox_fusion"}})
    with pytest.raises(ConfigError, match="sandbox_fusion"):
        tool({"sandbox": {**TRUSTED, "url": "http://x"}})


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [
        (
            {"provider": "sandbox_fusion", "url": "http://x", "num_warm": 1},
            "num_warm has no effect",
        ),
        (TRUSTED, ""),
    ],
)
def test_unused_keys_unread_sandbox_keys_are_reported(
    caplog: pytest.LogCaptureFixture, sandbox: dict[str, Any], message: str
):
    PythonTool({"sandbox": sandbox})
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)


def test_values_of_the_gsm8k_tool_are_checked():
    with pytest.raises(ConfigError, match="repeat_penalty"):
        Gsm8kTool({"repeat_penalty": "much"})
