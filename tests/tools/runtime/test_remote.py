"""Tools in the process that has their resources: results, errors, time-outs, the process' death."""

import asyncio
import os
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.errors import ConfigError, ToolError, WorkerLostError
from agentrl.messages import CallOutcome, ToolResponse
from agentrl.plugins.call import setting_up
from agentrl.tools import BaseTool, ToolResult, initialize_tools_from_config
from agentrl.tools.runtime.instance import ToolInstance, ToolKwargs
from agentrl.tools.runtime.process import PackedTool
from agentrl.tools.runtime.remote import HostedTool
from tests.fakes.runs import write_yaml
from tests.fakes.tools import call, schema
from tests.plugins.test_call import Clock

clocks: list[Clock] = []


class CountingTool(BaseTool):
    """Counts its calls in each instance, and misbehaves as `do` says."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or schema("count", do={"type": "string"}))
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, *, start: int = 0, **_: Any):
        """Begin to count, under an id of its own."""
        name = f"{instance_id}-{os.getpid()}-{len(self.counts)}"
        self.counts[name] = start
        return name, ToolResponse(text=f"from {start}")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
        """Count."""
        match parameters["do"]:
            case "refuse":
                raise ToolError("not this")
            case "raise":
                raise KeyError("price")
            case "exit":
                raise SystemExit(3)
            case "set up":
                with setting_up():
                    await clocks[-1].move(200)
            case "hang":
                await asyncio.Event().wait()
            case "lambda":
                return ToolResponse(text="x"), 0.0, {"f": lambda: 0}
        self.counts[instance_id] += 1
        return ToolResult(ToolResponse(text=str(self.counts[instance_id])), 0.5)

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Return the count."""
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **_: Any) -> None:
        """Forget the count."""
        del self.counts[instance_id]


class Remote:
    """A `HostedTool` in this process that can be lost."""

    name = "tool count"

    def __init__(self, tool: BaseTool) -> None:
        self.packed = PackedTool.of(tool)
        self.hosted = HostedTool(self.packed.build())
        self.dies_in_call = False
        self.is_blocked = False
        self.cancelled = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the hosted tool, unless it dies."""
        if self.dies_in_call:
            self.dies_in_call = False
            self.replace()
            raise WorkerLostError("tool count died")
        try:
            if self.is_blocked:
                await asyncio.Event().wait()
            return await getattr(self.hosted, method)(*arguments)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def wait_until_ready(self) -> None:
        """It is ready at once."""

    def replace(self) -> None:
        """Start it again, without its state."""
        self.hosted = HostedTool(self.packed.build())


def make(timeout_s: float = 5.0, **config: Any) -> tuple[Remote, ToolInstance]:
    tool = CountingTool(config)
    remote = Remote(tool)
    tool.remote_object = remote
    kwargs = ToolKwargs.of("count", {"create_kwargs": {"start": 3}})
    return remote, ToolInstance(tool, instance_id="r", kwargs=kwargs, timeout_s=timeout_s)


async def test_calls_keep_the_state_of_their_instance():
    remote, instance = make()
    assert (await instance.create()).text == "from 3"
    outcomes = [await instance.execute(call("count", do="")) for _ in range(2)]
    assert [(one.response.text, one.reward) for one in outcomes] == [("4", 0.5), ("5", 0.5)]
    assert await instance.calc_reward() == 5.0
    assert instance.needs_release
    assert await instance.release() is None
    assert remote.hosted.load() == {"instances": 0}


@pytest.mark.parametrize(
    ("do", "outcome", "said"),
    [
        ("refuse", CallOutcome.TOOL_ERROR, "not this"),
        ("raise", CallOutcome.CRASHED, "KeyError: 'price'"),
        ("exit", CallOutcome.CRASHED, "SystemExit"),
        ("lambda", CallOutcome.CRASHED, "lambda"),
        ("hang", CallOutcome.TIMEOUT, "no answer within 0.2 s"),
    ],
)
async def test_errors_come_back_as_they_are(do: str, outcome: CallOutcome, said: str):
    _, instance = make(timeout_s=0.2)
    await instance.create()
    found = await instance.execute(call("count", do=do))
    assert found.outcome is outcome
    assert said in found.message
    assert (await instance.execute(call("count", do=""))).response.text == "4"


async def test_a_set_up_there_is_not_time_of_the_call(monkeypatch: pytest.MonkeyPatch):
    _, instance = make(timeout_s=100.0)
    await instance.create()
    clocks.append(Clock(monkeypatch))
    assert (await instance.execute(call("count", do="set up"))).response.text == "4"


async def test_a_process_that_is_blocked_is_late():
    remote, instance = make(timeout_s=0.05)
    await instance.create()
    remote.is_blocked = True
    found = await instance.execute(call("count", do=""))
    assert found.outcome is CallOutcome.TIMEOUT
    assert "its process is blocked: no answer within 0.05 s" in found.message
    assert remote.cancelled == 2


async def test_cancelling_cancels_the_call_there():
    remote, instance = make()
    await instance.create()
    running = asyncio.create_task(instance.execute(call("count", do="hang")))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert remote.cancelled == 1


async def test_the_death_of_the_process_fails_only_the_call_in_it():
    remote, instance = make()
    await instance.create()
    await instance.execute(call("count", do=""))
    remote.dies_in_call = True
    lost = await instance.execute(call("count", do=""))
    assert lost.outcome is CallOutcome.CRASHED
    assert "died in execute" in lost.message
    assert (await instance.execute(call("count", do=""))).response.text == "4", "created again"
    remote.replace()
    assert (await instance.execute(call("count", do=""))).response.text == "4", "between two calls"
    assert await instance.release() is None


async def test_a_tool_in_a_process_of_that_process_is_killed_when_it_is_late():
    _, instance = make(timeout_s=20.0, isolation="process")
    await instance.create()
    late = asyncio.create_task(instance.execute(call("count", do="hang")))
    await asyncio.sleep(0.1)
    late.cancel()
    await asyncio.wait([late])
    assert (await instance.execute(call("count", do=""))).response.text == "4", "created again"
    assert await instance.release() is None


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"num_cpus": 0}, "num_cpus is 0; expected more than 0"),
        ({"CPU": 1}, "CPU is written num_cpus"),
        ({"disk": 1.5}, "above 1 only whole numbers"),
        ({"disk": "much"}, "disk"),
    ],
)
def test_wrong_resources_are_named(tmp_path: Any, resources: dict[str, Any], said: str):
    entry = {"class_name": f"{__name__}.CountingTool", "resources": resources}
    with pytest.raises(ConfigError) as error:
        initialize_tools_from_config(write_yaml(tmp_path / "tools.yaml", {"tools": [entry]}))
    assert said in str(error.value)
    assert "tools[0].resources" in str(error.value)


def test_resources_without_ray_are_noted(tmp_path: Any):
    from agentrl.trainer.setup.plugins import find_idle_resources, find_placed, load_plugins

    entry = {"class_name": f"{__name__}.CountingTool", "resources": {"num_cpus": 4}}
    file = write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})
    run: dict[str, Any] = {
        "data": {},
        "model": {"path": "m"},
        "rollout": {"multi_turn": {"tool_config_path": str(file)}},
        "reward": {"functions": [{"name": "gsm8k", "resources": {"disk": 1}}]},
    }
    config = parse_config(run)
    plugins = load_plugins(config)
    placed = [(one.key, one.resources) for one in find_placed(plugins, config)]
    assert placed == [("tool count", {"num_cpus": 4}), ("scorer gsm8k", {"disk": 1})]
    notes = find_idle_resources(plugins, config)
    assert [note.partition(":")[0] for note in notes] == ["tool count", "scorer gsm8k"]
    on_ray = parse_config(run | {"cluster": {"address": "auto"}})
    assert find_idle_resources(plugins, on_ray) == []
