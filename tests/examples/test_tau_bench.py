"""The example of an environment that nobody here wrote: its adapter is short, and scores right."""

import asyncio
import io
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.plugins import load_module
from agentrl.rewards import drive_and_score
from agentrl.rewards.managers import make_reward_manager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.tools import initialize_tools_from_config
from tests.fakes.plugins import calling, make_context, make_manager, make_scripted
from tests.fakes.runs import write_jsonl, write_yaml
from tests.fakes.tau_bench import TASKS, install

ADAPTER = Path(__file__).resolve().parents[2] / "examples/tau_bench/tau_retail.py"
MAX_LINES = 80


class StatesTheTask(BaseInteraction):
    """A user who says what the task is and has nothing to add."""

    async def start_interaction(
        self, instance_id: Any = None, goal: str = "", **kwargs: Any
    ) -> Any:
        return instance_id, goal

    async def generate_response(self, *args: Any, **kwargs: Any) -> InteractionResult:
        return InteractionResult(True)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch)
    module = load_module(str(ADAPTER))
    yield module
    del sys.modules[module.__name__]


def play(adapter: Any, folder: Path, turns: list[list[str]]) -> Sequence[AsyncRolloutRequest]:
    """Play each task's turns through the adapter's tools, rows and scorer."""
    entries = [
        {"class_name": f"{ADAPTER}:RetailTool", "config": {"tool": name}} for name in adapter.TOOLS
    ]
    tools = initialize_tools_from_config(write_yaml(folder / "tools.yaml", {"tools": entries}))
    rows = write_jsonl(folder / "rows.jsonl", [adapter.make_row(task) for task in TASKS])
    prompts = load_prompts([rows], DataConfig())
    engine = make_scripted(lambda ids, sampling, name, turn: turns[int(name.split("-")[2])][turn])
    context = make_context(engine, tools=tools, interactions=[StatesTheTask({"name": "user"})])
    manager = make_manager(context, n=1)
    custom = CustomRewardConfig(path=str(ADAPTER), name="compute_score")
    rewards = make_reward_manager(RewardConfig(custom_reward_function=custom))
    requests = manager.make_requests(prompts, manager.train_plan())
    done = asyncio.run(drive_and_score(manager, rewards, requests, on_finished=lambda _: None))
    assert adapter.DATABASES == {}
    return done


RECORDED = [
    [
        *(calling(step.name, **step.kwargs) for step in task.actions),
        "There are 1,000 orders.",
    ]
    for task in TASKS
]


def test_recorded_actions_score_1(adapter: Any, tmp_path: Path) -> None:
    done = play(adapter, tmp_path, RECORDED)
    assert [request.reward for request in done] == [1.0, 1.0]
    ends = [request.stop_reason for request in done]
    assert ends == [StopReason.INTERACTION_ENDED, StopReason.TOOL_ENDED]


def test_a_change_that_is_missing_scores_0(adapter: Any, tmp_path: Path) -> None:
    only_looks = [RECORDED[0][0], RECORDED[0][2]]
    only_transfers = RECORDED[1][1:]
    done = play(adapter, tmp_path, [only_looks, only_transfers])
    assert [request.reward for request in done] == [0.0, 0.0]


def test_an_output_that_is_not_said_scores_0(adapter: Any, tmp_path: Path) -> None:
    silent = [*RECORDED[0][:2], "It is canceled."]
    assert play(adapter, tmp_path, [silent, RECORDED[1]])[0].reward == 0.0


def test_the_adapter_is_short() -> None:
    source = ADAPTER.read_text(encoding="utf-8")
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0] for token in tokens if token.type not in skipped and token.string}
    assert len(lines) <= MAX_LINES
