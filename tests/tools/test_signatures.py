"""Tools in the styles of verl are built and created as their authors meant them."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools import BaseTool, initialize_tools_from_config
from agentrl.tools.runtime.instance import ToolInstance, ToolKwargs
from agentrl.tools.runtime.session import ToolSession
from agentrl.tools.runtime.settings import ToolSettings
from tests.fakes.tools import call, schema

SCHEMA = "{type: function, function: {name: probe, parameters: {type: object, properties: {}}}}"


class Answering(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return "answered"


class Recorder(Answering):
    """Records how it is created."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.seen: dict[str, Any] = {}


class TakesWhole(Recorder):
    async def create(self, instance_id=None, truth=None, create_kwargs=None):
        self.seen = {"truth": truth, "create_kwargs": create_kwargs}
        return instance_id, ToolResponse()


class ReadsWhole(Recorder):
    async def create(self, instance_id=None, truth=None, **kwargs):
        self.seen = {"truth": truth, "whole": kwargs.get("create_kwargs", {}).get("truth")}
        return instance_id, ToolResponse()


class TakesUnpacked(Recorder):
    async def create(self, instance_id=None, **kwargs):
        self.seen = kwargs
        return instance_id, ToolResponse()


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (TakesWhole, {"truth": 5, "create_kwargs": {"truth": 5, "more": 1}}),
        (ReadsWhole, {"truth": 5, "whole": 5}),
        (TakesUnpacked, {"truth": 5, "more": 1}),
    ],
)
def test_create_gets_the_rows_kwargs_as_its_signature_wants_them(
    kind: type[Recorder], seen: dict[str, Any]
):
    tool = kind({}, schema("probe"))
    kwargs = ToolKwargs(create_kwargs={"truth": 5, "more": 1})
    instance = ToolInstance(tool, instance_id="1", kwargs=kwargs, timeout_s=5)
    asyncio.run(instance.create())
    assert tool.seen == seen


class Lists(BaseTool):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return ["what was found"]


class Judges(BaseTool):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.5


def test_a_list_from_calc_reward_is_no_reward_and_fails_nothing():
    tools = {"lists": Lists({}, schema("lists")), "judges": Judges({}, schema("judges"))}

    async def rewards() -> dict[str, float]:
        session = ToolSession(tools, instance_id="1")
        await session.create()
        return await session.calc_rewards()

    assert asyncio.run(rewards()) == {"judges": 0.5}


class ConfigAlone(Answering):
    def __init__(self, config):
        self.name = "probe"
        super().__init__(config)

    def get_openai_tool_schema(self):
        return schema("probe")


class ConfigOnly(Answering):
    """Reads the schema of the YAML, keeps its state in `instances`, and passes the truth on."""

    def __init__(self, config):
        super().__init__(config)
        self.shown = self.name

    async def create(self, instance_id, ground_truth=None, **kwargs):
        instance_id, response = await super().create(instance_id, ground_truth)
        self.instances[instance_id] = {"truth": ground_truth}
        return instance_id, response

    async def execute(self, instance_id, parameters):
        return str(self.instances[instance_id]["truth"])

    async def release(self, instance_id):
        del self.instances[instance_id]


class ConfigAndMore(ConfigOnly):
    def __init__(self, config, **options):
        super().__init__(config)


class ConfigAndNone(ConfigOnly):
    def __init__(self, config):
        BaseTool.__init__(self, config, None)


class KeywordConfig(ConfigOnly):
    def __init__(self, *, config):
        super().__init__(config)


class NoConfig(Answering):
    def __init__(self):
        super().__init__({})


class Swapped(Answering):
    def __init__(self, tool_schema, config):
        super().__init__(config, tool_schema)


class OtherNames(Answering):
    def __init__(self, settings, shown):
        super().__init__(settings, shown)


class SetsItsName(Answering):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.name = tool_schema.function.name


class Misnamed(Answering):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.name = "other"


class Forgets(Answering):
    def __init__(self, config, tool_schema):
        self._instance_dict = {}


class ReadsTooEarly(Answering):
    def __init__(self, config, tool_schema):
        self.limit = self.config["limit"]
        super().__init__(config, tool_schema)


def load(folder: Path, kind: type, config: str = "{k: 1}", tool_schema: str = SCHEMA) -> BaseTool:
    path = folder / "tools.yaml"
    entry = f"class_name: {kind.__module__}.{kind.__name__}, config: {config}"
    path.write_text(f"tools: [{{{entry}, tool_schema: {tool_schema}}}]\n", encoding="utf-8")
    [tool] = initialize_tools_from_config(path)
    return tool


@pytest.mark.parametrize("kind", [Swapped, OtherNames, SetsItsName])
def test_constructors_get_config_and_schema_by_name_or_in_order(tmp_path: Path, kind: type):
    tool = load(tmp_path, kind)
    assert (tool.config, tool.name, tool.tool_schema.name) == ({"k": 1}, "probe", "probe")


def test_a_constructor_may_take_config_alone(tmp_path: Path):
    tool = load(tmp_path, ConfigAlone, tool_schema="null")
    assert (tool.config, tool.name) == ({"k": 1}, "probe")


@pytest.mark.parametrize("isolation", ["none", "thread", "process"])
@pytest.mark.parametrize("kind", [ConfigOnly, ConfigAndMore, ConfigAndNone, KeywordConfig])
async def test_a_tool_that_takes_config_alone_serves_requests_with_the_yamls_schema(
    tmp_path: Path, kind: type, isolation: str
):
    tool = load(tmp_path, kind, f"{{isolation: {isolation}}}")
    assert (tool.name, tool.tool_schema.name) == ("probe", "probe")
    given = {"probe": {"create_kwargs": {"ground_truth": 42}}}
    session = ToolSession({"probe": tool}, instance_id="1", tools_kwargs=given)
    await session.create()
    [outcome] = await session.execute([call("probe")])
    assert outcome.response.text == "42"
    assert await session.release() == []
    assert tool.instances == {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoConfig, "NoConfig() takes no config"),
        (Misnamed, "names itself 'other', and its schema says 'probe'"),
        (Forgets, "the constructor of Forgets does not call super().__init__"),
        (ReadsTooEarly, "the constructor of ReadsTooEarly does not call super().__init__"),
    ],
)
def test_a_constructor_that_cannot_be_meant_is_an_error_at_load(
    tmp_path: Path, kind: type, message: str
):
    with pytest.raises(AgentRLError) as caught:
        load(tmp_path, kind)
    assert message in str(caught.value)
    assert caught.value.details["key"].startswith("tools[0]")


@pytest.mark.parametrize("key", ["rate_limit: 3", "retry: 3", "cache: true"])
def test_an_entry_of_verl_keeps_its_own_keys(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        tool = load(tmp_path, Recorder, f"{{type: native, {key}}}")
    name = key.partition(":")[0]
    assert tool.config[name]
    assert not ToolSettings.of(type(tool), tool.config).has_middleware
    ToolInstance(tool, instance_id="1", kwargs=ToolKwargs(), timeout_s=5)
    [line] = caplog.messages
    assert f"tools[0].config.{name}" in line
    assert "is left to the tool, as in verl" in line


@pytest.mark.parametrize("key", ["retry: 3", "cache: true"])
def test_elsewhere_such_a_key_is_agentrls_and_the_error_says_so(tmp_path: Path, key: str):
    with pytest.raises(AgentRLError) as caught:
        load(tmp_path, Recorder, f"{{{key}}}")
    assert "if the key is the tool's own, rename it, or add type: native" in str(caught.value)


def test_mappings_are_agentrls_keys_in_an_entry_of_verl_too(tmp_path: Path):
    tool = load(tmp_path, Recorder, "{type: native, retry: {max_attempts: 2}}")
    retry = ToolSettings.of(type(tool), tool.config).retry
    assert retry is not None
    assert retry.max_attempts == 2
