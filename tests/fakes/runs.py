"""Runs small enough to be tests: a home with data and a policy, run files, the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from agentrl.cli import main
from agentrl.trainer.rollouts.line_files import LineReader

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data"
CALCULATOR = ROOT / "configs/tool_config/calculator_tool_config.yaml"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


def make_home(folder: Path) -> Path:
    """Make `data/` and `policy/` in a folder."""
    from agentrl.config.schema.prepare import ArithmeticConfig, TinyPolicyConfig
    from agentrl.quickstart.arithmetic import prepare_arithmetic
    from agentrl.quickstart.tiny_policy import make_tiny_policy
    from agentrl.tools import initialize_tools_from_config

    data = ArithmeticConfig(out_dir=folder / "data", num_train=24, num_val=6, num_demos=120)
    files = prepare_arithmetic(data)
    policy = TinyPolicyConfig(
        out_dir=folder / "policy",
        corpus=files.demos,
        vocab_size=400,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=48,
        max_position_embeddings=1024,
    )
    tools = initialize_tools_from_config(CALCULATOR)
    make_tiny_policy(policy, tools=[tool.tool_schema for tool in tools])
    return folder


def tiny_run(home: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run file's content: two steps of four prompts, with the calculator.

    Args:
        home: From `make_home`.
        folder: The run's own.
        **changes: Sections, merged into the run file's; dots may be written as `__`.
    """
    run: dict[str, Any] = {
        "data": {
            "train_files": [str(home / "data/train.parquet")],
            "val_files": {"arithmetic": str(home / "data/val.parquet")},
            "train_batch_size": 4,
            "max_prompt_length": 224,
            "max_response_length": 64,
            "filter_num_workers": 1,
            "cache_dir": str(home / "cache"),
        },
        "model": {"path": str(home / "policy")},
        "rollout": {
            "n": 2,
            "multi_turn": {
                "tool_config_path": str(CALCULATOR),
                "max_assistant_turns": 3,
                "max_tokens_per_turn": 12,
                "max_tool_response_length": 16,
            },
        },
        "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        "trainer": {
            "default_local_dir": str(folder),
            "total_training_steps": 2,
            "device": "cpu",
            "plot": False,
        },
    }
    for path, value in changes.items():
        put(run, path.replace("__", "."), value)
    return run


def put(run: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key; None removes it."""
    *sections, leaf = path.split(".")
    for section in sections:
        run = run.setdefault(section, {})
    if value is None:
        run.pop(leaf, None)
    else:
        run[leaf] = value


def write_yaml(file: Path, content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def scripted(*answers: str) -> dict[str, Any]:
    """The engine section of a run whose policy says `answers`, turn by turn."""
    return {"name": "scripted", "scripted": {"answers": list(answers)}}


class CommandOutput(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_agentrl(capsys: Any, *arguments: object) -> CommandOutput:
    """Run the command line in this process."""
    capsys.readouterr()
    code: Any = None
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return CommandOutput(code or 0, out, err)


def spawn_agentrl(
    *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, as the installed package runs."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(sys.executable).with_name("agentrl")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "agentrl"]
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        cwd=cwd,
        env=kept | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, also a compressed one."""
    with LineReader(file) as lines:
        return [json.loads(line) for line in lines]
