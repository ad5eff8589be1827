"""Plug-ins in the style of verl 0.6.1 load unmodified through the stand-in, and run."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl.compat
import agentrl.compat.verl  # it registers a finder, before a fixture restores sys.meta_path
from agentrl.compat import install_verl
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.interactions import initialize_interactions_from_config
from agentrl.plugins import load_object
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.tools import initialize_tools_from_config
from tests.fakes.plugins import calling, make_context, make_engine, make_manager, make_prompts
from tests.fakes.sandbox_fusion import fusion_service

FILES = {
    "their_tool.py": """
import logging
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class SumTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.rate_limit = config.get("rate_limit", 10)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": []}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        state = self._instance_dict[instance_id]
        answer = str(parameters.get("answer", ""))
        score = gsm8k.compute_score(f"#### {answer}", state["ground_truth"], method="flexible")
        state["reward"].append(score)
        return ToolResponse(text=f"{answer} is worth {score}"), score, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> list:
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
""",
    "their_user.py": """
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k


class AskAgainInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        truth = self._instance_dict[instance_id]["ground_truth"]
        reward = gsm8k.compute_score(messages[-1]["content"], truth)
        return reward == 1.0, "Again, please.", reward, {}

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
""",
    "their_sandbox.py": """
import re
from typing import Any

from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo
from verl.utils.rollout_trace import rollout_trace_op


class FencedTool(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.fence = re.compile(r"```python(.*?)```", re.DOTALL)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        code = parameters["code"]
        found = self.fence.findall(code)
        code = found[0].strip() if found else code
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, timeout, language
        )
        return result, None, None


class LabelledDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.map(self.label)

    def label(self, row: dict) -> dict:
        row["prompt"][0]["content"] += " Use a box."
        return row


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (extra_info["num_turns"] - 2) / 2 * 0.1)
    if result["pred"] is None:
        result["pred"] = ""
    return result
""",
    "their_manager.py": """
import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("their_manager")
class TheirManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False):
        return torch.zeros_like(data.batch["responses"])
""",
}

SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: Do it.
        parameters: {{type: object, properties: {{{key}: {{type: string}}}}, required: [{key}]}}
"""
SUM_YAML = (
    'tools:\n  - class_name: "their_tool.SumTool"\n    config: {type: native, rate_limit: 2}'
    + SCHEMA.format(name="sum", key="answer")
)
USER_YAML = """
interaction:
  - {name: asker, class_name: their_user.AskAgainInteraction, config: {}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in (FILES | {"tool.yaml": SUM_YAML, "user.yaml": USER_YAML}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(agentrl.compat.SWITCH, "0")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)
    install_verl()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("verl", *(file.removesuffix(".py") for file in FILES)):
            del sys.modules[name]


def roll_out(tools: Any, interactions: Any, *answers: str, **row: Any) -> AsyncRolloutRequest:
    context = make_context(
        make_engine(*answers), tools=tools, interactions=[*interactions.values()]
    )
    manager = make_manager(context, n=1)
    requests = manager.make_requests(make_prompts(1, **row), manager.train_plan())
    return asyncio.run(manager.rollout(requests))[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tool_and_an_interaction_run_as_they_are(here: Path):
    tools = initialize_tools_from_config(here / "tool.yaml")
    users = initialize_interactions_from_config(here / "user.yaml")
    row = {
        "tools_kwargs": {"sum": {"create_kwargs": {"ground_truth": "11"}}},
        "interaction_kwargs": {"name": "asker", "ground_truth": "11"},
    }
    request = roll_out(tools, users, calling("sum", answer="11"), "#### 10", "#### 11", **row)
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    assert [message.text for message in request.messages[2:]] == [
        "11 is worth 1.0",
        "#### 10",
        "Again, please.",
        "#### 11",
    ]
    assert request.reward_scores == {"user_turn_rewards": [1.0, 0.0, 1.0]}


async def test_a_subclass_of_the_sandbox_tool_runs_its_code_through_the_pool(here: Path):
    async with fusion_service() as service:
        config = f"{{type: native, sandbox_fusion_url: '{service.url}', num_workers: 2}}"
        entry = f"tools:\n  - class_name: their_sandbox.FencedTool\n    config: {config}"
        (here / "tool.yaml").write_text(entry + SCHEMA.format(name="code", key="code"))
        [tool] = initialize_tools_from_config(here / "tool.yaml")
        response, reward, metrics = await tool.execute("1", {"code": "```python\nprint(1)\n```"})
        await tool.shutdown()
    assert (response.text, reward, metrics) == ("1\n", None, None)


def test_a_dataset_class_gives_its_rows(here: Path):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    (here / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    config = DataConfig.model_validate(
        {"train_files": [], "custom_cls": {"path": "their_sandbox", "name": "LabelledDataset"}}
    )
    prompts = load_prompts([here / "rows.jsonl"], config, max_samples=1)
    assert [prompts[0].messages[0].text, len(prompts)] == ["What is 1 + 1? Use a box.", 1]


def test_a_reward_function_scores_with_verls_functions(here: Path):
    scorer = load_object("their_sandbox:compute_score")
    assert scorer("aime", r"so \boxed{3}", "3", {"num_turns": 2})["score"] == 1.0
    wrong = scorer("aime", "I do not know", "3", {"num_turns": 4})
    assert (wrong["score"], wrong["pred"]) == (-0.9, "")
