"""What a run makes first: once, by the content of what it is made of."""

import json
import shutil
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import RunConfig, parse_config
from agentrl.errors import DataError
from agentrl.tools import BaseTool, function_tool, load_function_tools
from agentrl.tools.calculator_tool import CalculatorTool
from agentrl.tools.function_tool import FunctionTool
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.setup.prepare import compare_tools, prepare_run
from agentrl.trainer.state.resume import policy_origin
from agentrl.workers.distributed import World, start_world

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}


@pytest.fixture
def world() -> World:
    return start_world("cpu", timeout_s=60)


def config_in(folder: Path, **sizes: int) -> RunConfig:
    demos = str(folder / "data/demos.jsonl")
    policy = {"out_dir": str(folder / "policy"), "corpus": demos} | SIZES | sizes
    warm_up = {
        "model_path": policy["out_dir"],
        "train_file": demos,
        "out_dir": str(folder / "warm"),
        "steps": 1,
        "batch_size": 2,
    }
    problems = {"out_dir": str(folder / "data"), "num_train": 4, "num_val": 4, "num_demos": 20}
    return parse_config(
        {
            "prepare": {"arithmetic": problems, "tiny_policy": policy, "sft": warm_up},
            "data": {"train_files": [str(folder / "data/train.parquet")]},
            "model": {"path": warm_up["out_dir"]},
            "trainer": {"default_local_dir": str(folder)},
        }
    )


def prepare(config: RunConfig, world: World, *tools: BaseTool) -> list[str]:
    """What it tells, one line for each of problems, policy and warm-up (its steps left out)."""
    output = StringIO()
    run_logger = RunLogger(config.trainer, console=Console(file=output))
    prepare_run(config, world, run_logger, [CalculatorTool({}), *tools], now=datetime(2031, 1, 1))
    return [line for line in output.getvalue().splitlines() if "warm-up step" not in line]


def test_folder_that_was_moved_holds_what_it_held_before(world: World, tmp_path: Path):
    first = config_in(tmp_path / "one")
    prepare(first, world)
    shutil.move(tmp_path / "one", tmp_path / "two")
    second = config_in(tmp_path / "two")
    assert all("made before" in line for line in prepare(second, world))
    (tmp_path / "alias").symlink_to(tmp_path / "two")
    respelled = config_in(tmp_path / "alias")
    assert all("made before" in line for line in prepare(respelled, world))
    assert policy_origin(second) == policy_origin(respelled)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(config: RunConfig, **keys: Any) -> RunConfig:
    assert config.prepare.sft is not None
    sft = config.prepare.sft.model_copy(update=keys)
    prepare = config.prepare.model_copy(update={"sft": sft})
    return config.model_copy(update={"prepare": prepare})


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def test_changed_settings_stop_before_anything_is_overwritten(world: World, tmp_path: Path):
    config = config_in(tmp_path)
    prepare(config, world)
    before = files_in(tmp_path)
    for other, what in (
        (config_in(tmp_path, num_layers=1), "num_layers: 2 -> 1"),
        (changed(config, steps=2), "steps: 1 -> 2"),
    ):
        with pytest.raises(DataError, match="finished files are not replaced") as caught:
            prepare(other, world)
        assert caught.value.details["changed"] == what
        assert files_in(tmp_path) == before


def test_warm_up_is_shown_the_tools_of_the_run(world: World, tmp_path: Path):
    config = changed(config_in(tmp_path), num_held_out=2)
    prepare(config, world, FunctionTool(add))
    made = json.loads((tmp_path / "warm/manifest.json").read_text())["arguments"]
    names = [tool["function"]["name"] for tool in made["tools"]]
    assert names == ["calculator", "add"]


def test_warm_up_without_the_tools_of_the_run_is_reported(world: World, tmp_path: Path):
    source = (
        "from agentrl.tools import function_tool\n\n@function_tool\ndef other(a: int) -> str:\n"
    )
    (tmp_path / "mine.py").write_text(source + "    return str(a)\n")
    shown = load_function_tools(tmp_path / "mine.py")
    notes = list(compare_tools([tool.tool_schema for tool in shown], [FunctionTool(add)]))
    assert any("not shown the tool 'add'" in note for note in notes)
    assert any("'other', which the run does not have" in note for note in notes)
    assert not list(compare_tools([FunctionTool(add).tool_schema], [FunctionTool(add)]))
