"""The tools that run code in the sandbox: what the model sees, what stays, what dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, SandboxError
from agentrl.messages import CallOutcome
from agentrl.sandbox import Execution, ExecutionEnd
from agentrl.sandbox.guest_client import GuestClient
from agentrl.sandbox.spawner_client import SpawnerClient
from agentrl.tools import BaseTool, ToolResult, initialize_tools_from_config
from agentrl.tools.bash_tool import BashTool
from agentrl.tools.python_tool import PythonTool
from agentrl.tools.runtime.instance import ToolInstance, ToolKwargs
from agentrl.tools.sandbox_tool import SandboxTool, describe_execution
from tests.fakes.tools import call

CONFIGS = Path(__file__).resolve().parents[2] / "configs/tool_config"


@asynccontextmanager
async def instance(tool: BaseTool, name: str = "r") -> AsyncIterator[str]:
    """One request's life with a tool."""
    instance_id, response = await tool.create(name)
    assert response.is_empty()
    try:
        yield instance_id
    finally:
        await tool.release(instance_id)


async def python(tool: PythonTool, instance_id: str, code: str) -> str:
    result = ToolResult.of(await tool.execute(instance_id, {"code": code}), tool=tool.name)
    return result.response.text or ""


@pytest.fixture
async def tool() -> AsyncIterator[PythonTool]:
    made = PythonTool({})
    yield made
    await made.shutdown()


async def test_names_and_files_stay_for_the_request_and_die_with_it(tool: PythonTool):
    async with instance(tool, "a") as a, instance(tool, "b") as b:
        assert await python(tool, a, "x = 6\nopen('f', 'w').write('7')\nNone") == "(no output)"
        assert await python(tool, a, "print('got')\nx * int(open('f').read())") == "got\n42"
        assert "NameError: name 'x' is not defined" in await python(tool, b, "x")
        assert "FileNotFoundError" in await python(tool, b, "open('f')")
    async with instance(tool, "a") as again:
        assert "NameError" in await python(tool, again, "x")
    assert vars(tool)["_sessions"] == {}


async def test_an_error_is_a_traceback_of_the_models_lines_alone(tool: PythonTool):
    async with instance(tool) as r:
        text = await python(tool, r, "print('before')\ndef f():\n    return 1 / 0\nf()\n")
        result = await tool.execute(r, {"code": "1 / 0"})
    assert text.startswith("before\nTraceback (most recent call last):")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "line 3, in f" in text
    assert "agentrl" not in text
    assert "/" not in text.replace("1 / 0", "").replace("~~^~~", "")
    assert result.metrics is not None
    assert (result.metrics["end"], result.reward) == ("error", None)


async def test_a_traceback_says_what_the_error_says_and_shortens_the_files_alone(tool: PythonTool):
    module = "def fail(path):\n    raise ValueError('see ' + path)\n"
    async with instance(tool) as r:
        said = await python(tool, r, "raise ValueError('see /tmp/abc')")
        asked = await python(tool, r, "import os\nos.listdir('/tmp/x')")
        await python(tool, r, f"open('mine.py', 'w').write({module!r})")
        inside = await python(tool, r, "import mine\nmine.fail('/tmp/x')")
        await python(tool, r, "open('bad.py', 'w').write('1 +')")
        unread = await python(tool, r, "import bad")
    assert said.endswith("ValueError: see /tmp/abc")
    assert "    os.listdir('/tmp/x')\nFileNotFoundError" in asked
    assert asked.endswith("No such file or directory: '/tmp/x'")
    assert 'File "mine.py", line 2, in fail' in inside
    assert inside.endswith("ValueError: see /tmp/x")
    assert 'File "bad.py", line 1' in unread


@pytest.mark.parametrize("behind", ["", "\n", "\r\nx = '\x0c'\r\n"])
async def test_carets_are_below_the_failing_code_on_the_last_line_too(
    tool: PythonTool, behind: str
):
    async with instance(tool) as r:
        text = await python(tool, r, f"a = 1\nb=bytearray(-1){behind}")
        two = await python(tool, r, "a = '\x0c'\n(a + 1) + (2 + 3)")
    assert "    b=bytearray(-1)\n      ^^^^^^^^^^^^^\n" in text
    assert "    (a + 1) + (2 + 3)\n     ~~^~~\n" in two


async def test_a_fence_is_taken_off_and_parallel_calls_go_one_after_another(tool: PythonTool):
    async with instance(tool) as r:
        assert await python(tool, r, "```python\nn = 0\nn\n```") == "0"
        counts = await asyncio.gather(*(python(tool, r, "n += 1\nn") for _ in range(5)))
    assert sorted(counts) == ["1", "2", "3", "4", "5"]


async def test_the_echo_can_be_left_out():
    tool = PythonTool({"echo_last_expression": False})
    async with instance(tool) as r:
        assert await python(tool, r, "1 + 1") == "(no output)"
    await tool.shutdown()


async def test_what_was_stopped_says_why_and_what_is_lost():
    tool = PythonTool({"sandbox": {"timeout_s": 1.0, "memory_bytes": 128 * 1024**2}})
    async with instance(tool) as r:
        await python(tool, r, "x = 1\nopen('f', 'w').write('7')")
        late = await tool.execute(r, {"code": "while True: pass"})
        anew = await python(tool, r, "print(open('f').read())\nx")
        big = await tool.execute(r, {"code": "y = bytearray(10**9)"})
    await tool.shutdown()
    text = late.response.text or ""
    assert "time was up" in text
    assert text.endswith(tool.lost_text)
    assert late.metrics is not None
    assert late.metrics["end"] == "timeout"
    assert "7" in anew
    assert "NameError" in anew
    assert big.metrics is not None
    assert big.metrics["end"] == "memory"


async def test_files_stay_between_commands_and_the_folder_does_not_change():
    tool = BashTool({})
    async with instance(tool) as r:
        first = await tool.execute(
            r, {"command": "[[ 1 < 2 ]] && echo hello > a.txt; x=1; cd /; pwd"}
        )
        second = await tool.execute(r, {"command": "```bash\ncat a.txt; echo $x; ls nope\n```"})
    await tool.shutdown()
    assert first.response.text == "/"
    assert (second.response.text or "").startswith("hello\n")
    assert (second.response.text or "").endswith("[exit code 2]")
    assert second.metrics is not None
    assert second.metrics["end"] == "error"


async def test_a_shell_names_itself_in_its_errors():
    tool = BashTool({})
    async with instance(tool) as r:
        result = await tool.execute(r, {"command": "nope"})
    await tool.shutdown()
    assert (result.response.text or "").startswith("bash: line 1: nope: command not found")


async def test_a_sandbox_that_fails_is_a_crash_and_not_the_models(tool: PythonTool):
    class Broken:
        async def run(self, source: str, **_: Any) -> Execution:
            raise SandboxError("gone", provider="sandlock")

        async def close(self) -> None:
            pass

    one = ToolInstance(tool, instance_id="r", kwargs=ToolKwargs(), timeout_s=5)
    await one.create()
    await vars(tool)["_sessions"]["r"].close()
    vars(tool)["_sessions"]["r"] = Broken()
    outcome = await one.execute(call("python", code="1"))
    await one.release()
    assert outcome.outcome is CallOutcome.CRASHED
    assert "gone" in outcome.message
    assert "gone" not in (outcome.response.text or "")


async def test_a_cancelled_call_leaves_a_session_that_ends(tool: PythonTool):
    async with instance(tool) as r:
        task = asyncio.create_task(python(tool, r, "while True: pass"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await tool.release("r")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"sandbox": {"memory": 3}}, "config.sandbox.memory"),
        ({"sandbox": {"timeout_s": 0}}, "config.sandbox.timeout_s"),
        ({"sandbox": 3}, "config.sandbox"),
        ({"echo_last_expression": "yes"}, "config.echo_last_expression"),
        ({"isolation": "process"}, "config.isolation"),
        ({"timeout_s": 3}, "config.timeout_s"),
        ({"timeout_s": 3, "sandbox": {"timeout_s": 3}}, "config.timeout_s"),
    ],
)
def test_a_wrong_key_is_named(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as error:
        PythonTool(config)
    assert error.value.details["key"] == key


@pytest.mark.parametrize("kind", [PythonTool, BashTool])
def test_code_is_stopped_before_its_tool_is_given_up_on(kind: type[SandboxTool]):
    assert kind({"timeout_s": 3, "sandbox": {"timeout_s": 2.5}})
    with pytest.raises(ConfigError, match="timeout_s is 3, and the sandbox gives the code 10 sec"):
        kind({"timeout_s": 3})


def test_where_no_sandbox_is_to_be_had_the_tool_is_not_built():
    with pytest.raises(SandboxError, match="trusted"):
        PythonTool({"sandbox": {"provider": "subprocess"}})


@pytest.mark.parametrize("name", ["python", "bash", "sandbox_fusion"])
def test_the_bundled_files_load(name: str):
    (tool,) = initialize_tools_from_config(CONFIGS / f"{name}_tool.yaml")
    assert tool.name == {"sandbox_fusion": "code_interpreter"}.get(name, name)
    assert tool.tool_schema.function.parameters["required"]


def test_what_was_cut_and_what_was_stopped_is_said_in_order():
    execution = Execution(
        end=ExecutionEnd.KILLED, stdout="a\n", stderr="b\n", num_cut_bytes=3, exit_code=None
    )
    assert describe_execution(execution, lost="All is lost.") == (
        "a\nb\n[3 more bytes of output were thrown away]\nAll is lost."
    )
    assert describe_execution(Execution(end=ExecutionEnd.OK)) == "(no output)"


async def test_the_start_of_a_sandbox_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch):
    start = GuestClient.start

    async def start_slowly(spawner: SpawnerClient) -> GuestClient:
        await asyncio.sleep(1.5)
        return await start(spawner)

    monkeypatch.setattr(GuestClient, "start", start_slowly)
    tool = BashTool({"timeout_s": 1.1, "sandbox": {"timeout_s": 1, "num_warm": 0}})
    one = ToolInstance(tool, instance_id="r", kwargs=ToolKwargs(), timeout_s=30)
    await one.create()
    outcome = await one.execute(call("bash", command="echo here"))
    assert (outcome.outcome, outcome.response.text) == (CallOutcome.OK, "here")
    await one.release()
    await tool.shutdown()
