"""Runs with faults: stopped, on a full disk, out of memory, with changed data."""

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.fakes.checkpoints import read_tensors
from tests.fakes.runs import (
    CALL,
    CommandOutput,
    read_lines,
    scripted,
    tiny_run,
    write_jsonl,
    write_yaml,
)

Train = Callable[..., CommandOutput]

TOOL = """
import asyncio
import os
import random
import signal
from pathlib import Path

from agentrl.tools import BaseTool, OpenAIFunctionToolSchema

HERE = Path(__file__).parent


class Counting(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "calculator"}})

    async def create(self, instance_id=None, **create_kwargs):
        (HERE / f"created-{instance_id}").touch()
        return instance_id

    async def execute(self, instance_id, parameters, **execute_kwargs):
        drawn = random.random()
        armed = HERE / "armed"
        if armed.exists() and instance_id.startswith(armed.read_text()):
            armed.rename(HERE / "fired")
            os.kill(os.getpid(), signal.SIGINT)
        if (HERE / "fired").exists():
            await asyncio.sleep(300)
        return f"{drawn}"

    async def release(self, instance_id, **release_kwargs):
        if (HERE / "clinging").exists():
            await asyncio.sleep(300)
        (HERE / f"created-{instance_id}").unlink()
"""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(extra_info["question"]) % 5)
"""


def make_plugin_folder(folder: Path) -> Path:
    """Make a folder with the code of a tool and a scorer, and twelve rows."""
    folder.mkdir()
    (folder / "counting.py").write_text(TOOL)
    (folder / "score.py").write_text(SCORER)
    tool = {"class_name": f"{folder}/counting.py:Counting"}
    write_yaml(folder / "tools.yaml", {"tools": [tool]})
    write_jsonl(folder / "rows.jsonl", [make_row(number) for number in range(12)])
    return folder


def make_row(number: int) -> dict[str, Any]:
    question = f"What is 6*{'7' * (1 + number % 7)}?"
    return {
        "prompt": [{"role": "user", "content": f"{number}: {question}"}],
        "data_source": "agentrl/arithmetic",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"question": question},
    }


def make_run(home: Path, plugin_folder: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Make a run of three steps with a tool: validates after each, saves after the last."""
    settings: dict[str, Any] = {
        "data__train_files": [str(plugin_folder / "rows.jsonl")],
        "data__val_files": {"rows": str(plugin_folder / "rows.jsonl")},
        "data__max_prompt_length": 300,
        "data__max_response_length": 200,
        "data__val_max_samples": 2,
        "rollout__n": 1,
        # The tool draws random numbers, so the order of its calls must be the same in each run.
        "rollout__deterministic": True,
        "rollout__engine": scripted(CALL, "#### 42"),
        "rollout__multi_turn": {
            "tool_config_path": str(plugin_folder / "tools.yaml"),
            "max_assistant_turns": 2,
            "tool_timeout_s": 200,
        },
        "algorithm__adv_estimator": "grpo_verl",
        "reward__custom_reward_function": {"path": str(plugin_folder / "score.py")},
        "trainer__total_training_steps": 3,
        "trainer__test_freq": 1,
        "actor__shuffle": True,
    }
    return tiny_run(home, folder, **settings | changes)


@contextmanager
def limit_file_size(size: int | None) -> Iterator[None]:
    """Make the system refuse writes beyond `size` bytes per file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def without_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    clocks = (
        "timing_s/", "perf/", "rollout/turn_seconds", "rollout/tool/", "reward/seconds",
        "weight_sync/seconds",
    )  # fmt: skip
    return {name: value for name, value in line.items() if not name.startswith(clocks)}


def assert_same_run(run: Path, whole: Path) -> None:
    """Check that a stopped and resumed run ends bit-identical to one that was never stopped."""
    lines = [read_lines(folder / "metrics.jsonl") for folder in (run, whole)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for ours, theirs in zip(*lines, strict=True):
        assert without_clock(ours) == without_clock(theirs)
    ours, theirs = (folder / "checkpoints/global_step_3" for folder in (run, whole))
    assert_same_tensors(ours, theirs)
    states = [json.loads((folder / "state.json").read_text()) for folder in (ours, theirs)]
    for state in states:
        del state["data"]["rows"]["files"]
    for part in ("data", "actor", "random", "step", "unlogged"):
        assert states[0][part] == states[1][part], part


def assert_same_tensors(checkpoint: Path, other: Path) -> None:
    ours, theirs = read_tensors(checkpoint), read_tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_refused(output: CommandOutput, *parts: str) -> None:
    assert output.code == 2, output
    assert "Traceback" not in output.out + output.err
    for part in parts:
        assert part in output.err, output.err


def saved_steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())
