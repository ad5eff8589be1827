"""The trainer as a library: objects in the place of paths, notebooks, one step at a time."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import Trainer, parse_config
from agentrl.config import RunConfig
from agentrl.engines import ScriptedEngine
from agentrl.errors import ConfigError, DataError
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.tools import function_tool
from agentrl.workers.distributed import stop_world
from tests.fakes.runs import ROOT

ROWS = [
    {"data_source": "mine", "prompt": f"What is {n}?", "reward_model": {"ground_truth": str(n)}}
    for n in range(4)
]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    stop_world()


def config_in(folder: Path, home: Path, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"train_batch_size": 2, "max_prompt_length": 400, "max_response_length": 200},
        "model": {"path": str(home / "policy")},
        "rollout": {"n": 2, "multi_turn": {"max_assistant_turns": 2}},
        "trainer": {
            "default_local_dir": str(folder), "total_training_steps": 1, "plot": False,
            "logger": [],
        },
    }  # fmt: skip
    return parse_config(base | sections)


@function_tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


def score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    return float(ground_truth in solution_str)


class Echo(BaseInteraction):
    """Asks once more."""

    async def generate_response(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, instance_id: str, messages: list[Any], **kwargs: Any
    ) -> InteractionResult:
        return InteractionResult(True, "Bye.", 0.5, {})


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "two"}}\n</tool_call>'


def scripted(_: Any, tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine([CALL, "It is 2."], tokenizer=tokenizer)


def test_objects_take_the_place_of_paths(tiny_home: Path, tmp_path: Path):
    rows = [{**row, "extra_info": {"interaction_kwargs": {"name": "echo"}}} for row in ROWS]
    trainer = Trainer(
        config_in(tmp_path, tiny_home),
        tools=[look_up],
        interactions=[Echo({})],
        reward=score,
        rows=rows,
        val_rows=rows[:2],
        engine=scripted,
    )
    with trainer:
        trainer.sync_weights()
        requests = trainer.sample(trainer.components.data.train)
    assert [request.reward for request in requests] == [0.0] * 4 + [1.0] * 2 + [0.0] * 2
    assert all(request.num_tool_calls == 1 for request in requests)
    assert [message.content for message in requests[0].messages if message.role == "tool"] == [
        "two is a word"
    ]
    assert {request.interaction_kwargs["name"] for request in requests} == {"echo"}
    assert list(trainer.components.data.val) == ["val"]


async def test_fit_works_under_a_running_event_loop(tiny_home: Path, tmp_path: Path):
    loop = asyncio.get_running_loop()
    config = config_in(tmp_path, tiny_home)
    trainer = Trainer(config, tools=[look_up], reward=score, rows=ROWS, engine=scripted)
    assert trainer.fit().steps == 1
    assert asyncio.get_running_loop() is loop
    assert (tmp_path / "trained/config.json").is_file()


def test_two_sources_of_one_thing_are_refused(tiny_home: Path, tmp_path: Path):
    named = {"custom_reward_function": {"path": "agentrl.rewards.gsm8k"}}
    config = config_in(tmp_path, tiny_home, reward=named)
    with pytest.raises(ConfigError, match="reward is given, and the configuration names"):
        Trainer(config, reward=score, rows=ROWS)
    config = config_in(tmp_path, tiny_home, data={"train_files": ["x.jsonl"]})
    with pytest.raises(ConfigError, match="rows is given"):
        Trainer(config, reward=score, rows=ROWS)


def test_wrong_objects_are_named(tiny_home: Path, tmp_path: Path):
    config = config_in(tmp_path, tiny_home)
    with pytest.raises(ConfigError, match="is not a tool"):
        Trainer(config, tools=[print], reward=score, rows=ROWS)
    with pytest.raises(DataError, match="a row without 'prompt'") as caught:
        Trainer(config, reward=score, rows=[*ROWS, {"question": "?"}])
    assert caught.value.details["row"] == 4


def test_a_scorer_in_the_file_of_the_script_is_not_loaded_twice(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "from agentrl.plugins import load_object\n"
        "from agentrl.rewards import register_reward_manager\n\n"
        "@register_reward_manager('mine')\nclass Mine:\n    pass\n\n"
        "def score():\n    pass\n\n"
        "assert load_object('script.py:score') is score\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, check=True, timeout=60
    )


@pytest.mark.slow
def test_the_scripts_of_the_page_run(
    tiny_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    page = (ROOT / "docs/library.md").read_text()
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").symlink_to(tiny_home / "policy")
    names: dict[str, Any] = {"__name__": "script"}
    for script in scripts:
        assert script.count("\n") < 60
        assert not re.findall(r"(?:import|from) agentrl\.(?:trainer|training)", script)
        exec(script, names)
    output = capsys.readouterr().out
    assert "2 steps\n" in output
    assert "step 2: [" in output
