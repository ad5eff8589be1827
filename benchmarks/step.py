"""A whole GRPO step with a tool: ours, next to TRL's if it is installed.

The work is in `step_work.py`: 16 samples of 4 turns, 740 prompt and 916 response tokens each
(26,496 in all), of which 6,400 are sampled; a Qwen2 of 5.2 M float32 weights (4 layers, 256 wide,
2 of 4 heads for keys, 5,120 words) with random values. The tokens are forced after each engine has
sampled its own, so both do all work of sampling and both have the same text. One step is
generation with its tool calls, log-probabilities, advantages, update and weight sync. Both sides
have their defaults, but TRL neither recomputes activations nor computes in bfloat16, both of which
its defaults do.

Each side runs in processes of its own, in turn, because peak memory is of a process. The first
step of a process is not counted. The fastest step of each side counts, as other load slows both.
`CPU` is the process's seconds on all cores, which other load changes least.

Expectation: at least 2 times TRL's speed with at most its memory.

Run: python benchmarks/step.py [--trl PYTHON] [repeats]
(PYTHON is the interpreter of an environment with `torch` and `trl==1.16.0`)
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import step_work as work
from transformers import AutoTokenizer

from agentrl import Trainer, parse_config
from agentrl.config.schema.prepare import TinyPolicyConfig
from agentrl.data.rows import Conversation
from agentrl.engines.transformers.requests import TrackedState
from agentrl.messages import Message
from agentrl.quickstart.tiny_policy import build_tiny_model, train_tokenizer
from agentrl.tools.function_tool import function_tool, schema_of

PHASES = {"generation": "gen", "log-probs": "old_log_prob", "update": "update_actor"}
"""By printed name: the stage of the trainer."""


def make_policy(folder: Path) -> None:
    """Write the model and its tokenizer, which knows digits and little else."""
    words = "Look up a value. Its key, name, arguments, type, function, parameters, properties."
    corpus = [Conversation(messages=[Message(role="user", content=words)])] * 10
    tokenizer = train_tokenizer(corpus, vocab_size=600)
    config = TinyPolicyConfig(
        out_dir=folder, corpus=folder, vocab_size=5120, hidden_size=256, num_layers=4, num_heads=4,
        num_kv_heads=2, intermediate_size=1024,
    )  # fmt: skip
    model = build_tiny_model(config, tokenizer)
    model.resize_token_embeddings(config.vocab_size)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def force_tokens(script: list[list[list[int]]]) -> None:
    """Replace what the engine has sampled for a call. Rows are numbered as they arrive."""
    update = TrackedState.update_and_check_completion
    calls: defaultdict[str, list[str]] = defaultdict(list)
    rows: dict[str, int] = {}

    def forced(state: TrackedState, token_id: int, logprob: float | None) -> bool:
        call = state.call
        row = rows.setdefault(call.request_id, len(rows))
        turns = calls[call.request_id]
        if not call.token_ids:
            turns.append(call.key)
        place = len(call.token_ids)
        return update(state, script[row % work.NUM_ROWS][len(turns) - 1][place], logprob)

    TrackedState.update_and_check_completion = forced


def run_ours(folder: Path) -> None:
    """Train, and print the figures of each counted step."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "policy")
    num_digits = work.answer_digits(tokenizer)

    @function_tool
    def lookup(key: str) -> str:
        """Look up a value.

        Args:
            key: Its key.
        """
        return work.digits(key, num_digits)

    num_scored = iter(range(10**6))

    def score(*_: Any, **__: Any) -> float:
        return float(next(num_scored) % 3)

    schema = schema_of(lookup).to_template()
    prompts = work.make_prompts(tokenizer, [schema])
    rows = [
        {"data_source": "digits", "prompt": prompt, "reward_model": {"ground_truth": ""}}
        for prompt in prompts
    ]
    config = {
        "data": {
            "train_batch_size": work.NUM_PROMPTS, "max_prompt_length": work.MAX_PROMPT,
            "max_response_length": work.MAX_RESPONSE, "shuffle": False,
        },
        "model": {"path": str(folder / "policy")},
        "rollout": {
            "n": work.NUM_SAMPLES,
            "multi_turn": {"max_assistant_turns": work.NUM_TURNS, "max_tokens_per_turn": 128},
        },
        "trainer": {
            "default_local_dir": str(folder / f"run{os.getpid()}"), "device": "cpu",
            "total_training_steps": work.NUM_STEPS, "plot": False, "logger": ["jsonl"],
        },
    }  # fmt: skip
    force_tokens(work.make_script(tokenizer))
    steps: list[dict[str, float]] = []
    with Trainer(parse_config(config), tools=[lookup], reward=score, rows=rows) as trainer:
        trainer.sync_weights()
        for _ in range(work.NUM_STEPS):
            start_cpu = time.process_time()
            metrics = trainer.train_step()
            steps.append({name: metrics.get(f"timing_s/{key}", 0) for name, key in PHASES.items()})
            steps[-1]["step"] = metrics["timing_s/step"]
            steps[-1]["CPU"] = time.process_time() - start_cpu
            for key, expected in (("prompt", 740), ("response", 916)):
                assert metrics[f"{key}_length/mean"] == expected, metrics
    _report(steps[1:])


def _report(steps: list[dict[str, float]]) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"steps": steps, "peak_mib": peak, "load": os.getloadavg()[0]}))


def run_side(python: str, script: str, folder: Path) -> dict[str, Any]:
    """Run one side in a process of its own, and return what it printed last."""
    file = Path(__file__).with_name(script)
    done = subprocess.run(
        [python, str(file), *(["--ours"] if script == "step.py" else []), str(folder)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl")
    parser.add_argument("--ours", type=Path)
    parser.add_argument("repeats", nargs="?", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.ours:
        run_ours(arguments.ours)
        return
    sides = {"ours": (sys.executable, "step.py")}
    if arguments.trl:
        sides["TRL"] = (arguments.trl, "step_trl.py")
    best: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_policy(folder / "policy")
        for name, side in list(sides.items()) * arguments.repeats:
            figures = run_side(*side, folder)
            fastest = min(figures["steps"], key=lambda step: step["step"])
            phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in fastest.items())
            peak = figures["peak_mib"]
            print(f"{name:>4}: {phases}, peak {peak:.0f} MiB, load {figures['load']:.1f}")
            seconds, most = best.get(name, (float("inf"), 0.0))
            best[name] = (min(seconds, fastest["step"]), max(most, peak))
    if "TRL" in best:
        speed = best["TRL"][0] / best["ours"][0]
        memory = best["ours"][1] / best["TRL"][1]
        print(f"ours over TRL: speed {speed:.2f} (at least 2), memory {memory:.2f} (at most 1)")


if __name__ == "__main__":
    main()
