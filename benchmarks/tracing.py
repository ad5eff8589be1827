"""What tracing costs: one run in which every second step is traced, to a file.

Each step rolls out 256 requests of two turns, with a tool call in the first one: 1,800 spans. The
engine is scripted and the policy has 28,000 weights, so a step is short and the share of tracing is
large. The processor time of a step is that of the whole process, so the thread that writes the file
counts. The recorded starts of turns and calls are part of every step.

Expectation: at most 0.3 ms of the processor for each request.

Run: python benchmarks/tracing.py [steps]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl import Trainer, parse_config
from agentrl.config.schema.prepare import ArithmeticConfig, TinyPolicyConfig
from agentrl.quickstart.arithmetic import prepare_arithmetic
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.tools import initialize_tools_from_config

CALCULATOR = Path(__file__).parents[1] / "configs/tool_config/calculator_tool_config.yaml"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


def make_run(home: Path, num_steps: int) -> dict[str, Any]:
    data = ArithmeticConfig(out_dir=home / "data", num_train=64, num_val=6, num_demos=120)
    files = prepare_arithmetic(data)
    policy = TinyPolicyConfig(
        out_dir=home / "policy", corpus=files.demos, vocab_size=400, hidden_size=32, num_heads=2,
        num_kv_heads=1, intermediate_size=48, max_position_embeddings=1024,
    )  # fmt: skip
    tools = initialize_tools_from_config(CALCULATOR)
    make_tiny_policy(policy, tools=[tool.tool_schema for tool in tools])
    return {
        "data": {
            "train_files": [str(home / "data/train.parquet")], "train_batch_size": 32,
            "max_prompt_length": 400, "max_response_length": 200, "filter_num_workers": 1,
            "cache_dir": str(home / "cache"),
        },
        "model": {"path": str(home / "policy")},
        "rollout": {
            "n": 8,
            "engine": {"name": "scripted", "scripted": {"answers": [CALL, "#### 42"]}},
            "multi_turn": {"tool_config_path": str(CALCULATOR)},
        },
        "trainer": {
            "default_local_dir": str(home / "run"), "total_training_steps": num_steps,
            "logger": ["jsonl"], "device": "cpu", "plot": False,
            "tracing": {"exporters": ["file"], "freq": 2},
        },
    }  # fmt: skip


def measure(trainer: Trainer, num_steps: int) -> dict[bool, list[tuple[float, float]]]:
    """Return processor and wall seconds of the steps without and with a trace."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    trainer.begin()
    for step in range(1, num_steps + 1):
        started = time.process_time(), time.perf_counter()
        trainer.end_step(trainer.train_step())
        wall = time.perf_counter() - started[1]
        time.sleep(0.3)  # in which the thread writes the file of this step
        if step > 2:
            found[step % 2 == 0].append((time.process_time() - started[0], wall))
    return found


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 42
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trainer = Trainer(parse_config(make_run(home, num_steps)))
        with trainer:
            found = measure(trainer, num_steps)
        file = max((home / "run/traces").iterdir())
        print(f"{file.stat().st_size / 256:.0f} bytes of a file for each request")
        for index, name in enumerate(("processor", "wall")):
            off, on = (statistics.median(one[index] for one in found[it]) for it in (False, True))
            each = (on - off) / 256 * 1e3
            print(f"{name}: {off * 1e3:.1f} ms of a step, {on * 1e3:.1f} ms with its trace:")
            print(f"    {on / off - 1:+.1%}, {each:.3f} ms for each request")


if __name__ == "__main__":
    main()
