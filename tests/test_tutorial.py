"""The plug-ins, row and run file of docs/tutorial.md work as printed."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml

from agentrl.config import parse_config
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.interactions import initialize_interactions_from_config
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.tools.registry import load_all_tools
from tests.fakes.plugins import calling, make_context, make_engine, make_manager, make_prompts

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/tutorial.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool, function, interaction, scorer = blocks("python")
    (tmp_path / "my_tools.py").write_text(tool, encoding="utf-8")
    (tmp_path / "my_functions.py").write_text(function, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(scorer, encoding="utf-8")
    (tmp_path / "my_interactions.py").write_text(interaction, encoding="utf-8")
    tool_yaml, interaction_yaml = blocks("yaml")[:2]
    (tmp_path / "tools.yaml").write_text(tool_yaml, encoding="utf-8")
    (tmp_path / "interactions.yaml").write_text(interaction_yaml, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def roll_out(here: Path, *answers: str) -> AsyncRolloutRequest:
    tools = load_all_tools(here / "tools.yaml", str(here / "my_functions.py"))
    interactions = initialize_interactions_from_config(here / "interactions.yaml")
    context = make_context(
        make_engine(*answers), tools=tools, interactions=[*interactions.values()]
    )
    manager = make_manager(context, n=1)
    prompts = make_prompts(
        1,
        tools_kwargs=json.loads(blocks("json")[0]),
        interaction_kwargs={"name": "doubter", "ground_truth": "42"},
    )
    requests = manager.make_requests(prompts, manager.train_plan())
    return asyncio.run(manager.rollout(requests))[0]


def test_tool_file_is_yaml(here: Path) -> None:
    assert yaml.safe_load((here / "tools.yaml").read_text())["tools"]


def test_tools_work(here: Path) -> None:
    request = roll_out(
        here,
        calling("shop", item="apple") + calling("shop", item="pear"),
        calling("days_between", first="2026-01-31", second="2026-02-02"),
        "It is 42.",
    )
    assert request.error is None
    outcomes = [(call.name, call.outcome) for turn in request.turns for call in turn.calls]
    assert outcomes == [("shop", "ok"), ("shop", "tool_error"), ("days_between", "ok")]
    assert request.tool_rewards["shop"] == 1.0
    texts = [message.text for message in request.messages if message.role == "tool"]
    assert texts == ["took apple", "there is no pear", "2"]


def test_interaction_works(here: Path) -> None:
    request = roll_out(here, "It is 41.", "It is 42.")
    users = [message.text for message in request.messages if message.role == "user"]
    assert users[-1] == "Are you sure?"
    assert str(request.stop_reason) == "interaction_ended"
    scores = [turn.reward for turn in request.turns if turn.role == "assistant"]
    assert scores == [0.0, 1.0]


def test_run_file_is_accepted(here: Path) -> None:
    config = parse_config(yaml.safe_load(blocks("yaml")[2]))
    assert config.rollout.multi_turn.interaction_config_path == Path("interactions.yaml")


def test_row_is_read(here: Path) -> None:
    (here / "rows.jsonl").write_text(blocks("json")[1], encoding="utf-8")
    prompt = load_prompts([here / "rows.jsonl"], DataConfig())[0]
    assert prompt.ground_truth == "apple"
    assert prompt.interaction_kwargs["name"] == "doubter"
