"""A tool and an interaction written for verl 0.6.1 run here, but for their import lines.

The page `docs/from_verl.md` gives the command that changes those; the tests run it.
"""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.rollout.tool_calls import check_calls
from agentrl.rollout.tool_parsers import ParsedCall, ParsedTurn
from agentrl.tools import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionToolSchema,
)
from agentrl.tools.from_verl import as_verl_shows
from agentrl.tools.registry import load_all_tools
from tests.fakes.plugins import calling, make_context, make_engine, make_manager, make_prompts

PAGE = Path(__file__).resolve().parents[1] / "docs/from_verl.md"

TOOL = '''
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)


class LedgerTool(BaseTool):
    """Keeps an account for one conversation."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.log = []

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, opening: int = 0, **kwargs
    ) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"balance": opening, "steps": []}
        self.log.append("create")
        return instance_id, ToolResponse(text=f"The balance is {opening}.")

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        account = self._instance_dict[instance_id]
        account["balance"] += int(parameters.get("amount", 0)) * kwargs.get("rate", 1)
        account["steps"].append(parameters)
        self.log.append("execute")
        reward = 0.0 if account["balance"] > 0 else -0.05
        return ToolResponse(text=f"The balance is {account['balance']}."), reward, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        self.log.append("calc_reward")
        return float(self._instance_dict[instance_id]["balance"] == kwargs["wanted"])

    async def release(self, instance_id: str, **kwargs) -> None:
        self.log.append("release")
        del self._instance_dict[instance_id]
'''

INTERACTION = '''
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction

logger = logging.getLogger(__name__)


class AuditorInteraction(BaseInteraction):
    """Asks for the balance until it is named."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        content = ""
        for i in range(len(messages) - 1, -1, -1):
            item = messages[i]
            if item.get("role") == "assistant":
                content = item.get("content")
                break
        self._instance_dict[instance_id]["response"] = content
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Thank you.", reward, {}
        return False, f"That is not it. {kwargs['query']}", reward, {}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        talk = self._instance_dict[instance_id]
        return 1.0 if talk["ground_truth"] in talk["response"] else 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
'''

TOOL_YAML = """
tools:
  - class_name: "their_tool.LedgerTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "book"
        description: "Book an amount."
        parameters:
          type: "object"
          properties:
            amount:
              type: "string"
              description: "How much."
          required: ["amount"]
"""

INTERACTION_YAML = """
interaction:
  - name: "auditor"
    class_name: "their_interaction.AuditorInteraction"
    config: {}
"""

ROW: dict[str, Any] = {
    "tools_kwargs": {
        "book": {
            "create_kwargs": {"opening": 5},
            "execute_kwargs": {"rate": 2},
            "calc_reward_kwargs": {"wanted": 11},
            "release_kwargs": {"quiet": True},
        }
    },
    "interaction_kwargs": {"name": "auditor", "query": "What is it?", "ground_truth": "11"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {"their_tool.py": TOOL, "their_interaction.py": INTERACTION}
    for name, text in (files | {"tool.yaml": TOOL_YAML, "user.yaml": INTERACTION_YAML}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (command,) = re.findall(r"^sed .*my_plugins\.py$", PAGE.read_text(encoding="utf-8"), re.M)
    filled = command.replace("my_plugins.py", " ".join(files))
    subprocess.run(filled, shell=True, check=True, cwd=tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_only_the_import_lines_are_changed(here: Path):
    for name, text in {"their_tool.py": TOOL, "their_interaction.py": INTERACTION}.items():
        now = (here / name).read_text(encoding="utf-8").splitlines()
        pairs = list(zip(text.splitlines(), now, strict=True))
        changed = [old for old, new in pairs if old != new]
        assert changed == [old for old, _ in pairs if old.startswith("from verl.")]
        assert "from verl" not in "\n".join(now)


def test_their_tool_and_their_interaction_run_through_the_runner(here: Path):
    tools = load_all_tools(here / "tool.yaml")
    interactions = initialize_interactions_from_config(here / "user.yaml")
    request = roll_out(tools, interactions, calling("book", amount="3"), "It is 10.", "It is 11.")
    assert request.error is None
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert [(message.role, message.text) for message in request.messages[1:]] == [
        ("tool", "The balance is 5."),
        ("assistant", ""),
        ("tool", "The balance is 11."),
        ("assistant", "It is 10."),
        ("user", "That is not it. What is it?"),
        ("assistant", "It is 11."),
    ]
    assert request.reward_scores == {"book": 1.0, "user_turn_rewards": [0.0, 0.0, 1.0]}
    (call,) = request.turns[0].calls
    assert (call.outcome, call.reward, call.metrics) == ("ok", 0.0, {"n": 1})
    assert vars(tools[0])["log"] == ["create", "execute", "calc_reward", "release"]
    assert vars(tools[0])["_instance_dict"] == {}
    assert vars(interactions["auditor"])["_instance_dict"] == {}
    assert request.metrics["release_failures"] == 0


def test_what_breaks_in_them_costs_their_request_alone(here: Path):
    tools = load_all_tools(here / "tool.yaml")
    interactions = initialize_interactions_from_config(here / "user.yaml")
    request = roll_out(tools, interactions, calling("book", amount="three"), "It is 5.", "11")
    assert [call.outcome for call in request.turns[0].calls] == ["crashed"]
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert request.reward_scores["book"] == 0.0


def roll_out(tools: Any, interactions: Any, *answers: str) -> AsyncRolloutRequest:
    context = make_context(
        make_engine(*answers), tools=tools, interactions=[*interactions.values()]
    )
    manager = make_manager(context, n=1)
    requests = manager.make_requests(make_prompts(1, **ROW), manager.train_plan())
    return asyncio.run(manager.rollout(requests))[0]


def test_a_schema_spelt_with_verls_records_is_any_json_schema() -> None:
    item = OpenAIFunctionPropertySchema(type="string", description="What to take.")
    sizes = OpenAIFunctionPropertySchema.model_validate({"type": "array", "items": {"type": "int"}})
    parameters = OpenAIFunctionParametersSchema(
        type="object", properties={"item": item}, required=["item"]
    )
    function = {"name": "shop", "description": "Take it.", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    assert sizes.model_dump()["items"] == {"type": "int"}
    assert schema.function.parameters == {
        "type": "object",
        "properties": {"item": {"type": "string", "description": "What to take."}},
        "required": ["item"],
    }


def test_a_schema_as_verl_dumps_it_is_read_and_checked() -> None:
    dumped = {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Score it.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": None, "enum": None}},
                "required": ["answer"],
            },
            "strict": False,
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(dumped)
    assert schema.to_template() == dumped
    good, bad = (
        check_calls(ParsedTurn("", [ParsedCall("calc", arguments)]), [schema])
        for arguments in ({"answer": "42"}, {"answer": 42})
    )
    assert (len(good.calls), len(bad.calls)) == (1, 0)


def test_the_schema_is_shown_as_verl_shows_it() -> None:
    given = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find.",
            "parameters": {
                "type": "object",
                "properties": {"queries": {"type": "array", "items": {"type": "string"}}},
                "required": ["queries"],
            },
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(given)
    sync = as_verl_shows(schema, "verl_sync").to_template()["function"]
    assert json.dumps(sync) == (
        '{"name": "search", "description": "Find.", "parameters": {"type": "object", '
        '"properties": {"queries": {"type": "array", "description": null, "enum": null}}, '
        '"required": ["queries"]}, "strict": false}'
    )
    loops = as_verl_shows(schema, "verl_async").to_template()["function"]
    assert loops["parameters"]["properties"] == {"queries": {"type": "array"}}
    assert "strict" not in loops


def test_arguments_that_the_schema_refuses_reach_a_tool_if_they_are_not_checked(here: Path):
    tools = load_all_tools(here / "tool.yaml")
    context = make_context(
        make_engine(calling("book", amount=3), "done"), tools=tools, check_tool_arguments=False
    )
    manager = make_manager(context, n=1)
    row = {**ROW, "interaction_kwargs": {}}
    requests = manager.make_requests(make_prompts(1, **row), manager.train_plan())
    [request] = asyncio.run(manager.rollout(requests))
    assert [call.outcome for call in request.turns[0].calls] == ["ok"]
    assert request.reward_scores["book"] == 1.0


FILE = """
actor_rollout_ref:
  model: {path: somewhere}
  rollout:
    name: hf
    multi_turn: {enable: true, tool_config_path: tools.yaml}
data: {train_files: rows.parquet}
algorithm: {adv_estimator: grpo}
"""


@pytest.mark.parametrize(
    ("overrides", "checked", "style"),
    [
        ([], False, "verl_sync"),
        (["actor_rollout_ref.rollout.mode=async"], False, "verl_async"),
        (["rollout.multi_turn.check_tool_arguments=true"], True, "verl_sync"),
        (["actor_rollout_ref.rollout.multi_turn.tool_schema_style=full"], False, "full"),
    ],
)
def test_a_run_file_of_verl_shows_and_takes_tools_as_verl_does(
    tmp_path: Path, overrides: list[str], checked: bool, style: str
):
    path = tmp_path / "run.yaml"
    path.write_text(FILE, encoding="utf-8")
    turns = load_config(path, overrides).rollout.multi_turn
    assert (turns.check_tool_arguments, turns.tool_schema_style) == (checked, style)


class OldInteraction(BaseInteraction):
    """Written for a system that calls `create`."""

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id


class ForgetfulInteraction(BaseInteraction):
    def __init__(self, config: dict[str, Any]) -> None:
        self.talks: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OldInteraction", "defines create, which is never called, and no start_interaction"),
        ("ForgetfulInteraction", "does not call super().__init__"),
    ],
)
def test_an_interaction_that_can_never_work_is_an_error_at_load(
    tmp_path: Path, name: str, message: str
):
    path = tmp_path / "users.yaml"
    path.write_text(f"interaction: [{{class_name: {__name__}.{name}}}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        initialize_interactions_from_config(path)
