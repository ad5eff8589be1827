"""TRL's side of `step.py`: its GRPO trainer with a tool, without vLLM, in a process of its own.

Run by `step.py` with the Python of an environment that has TRL. `gradient_checkpointing` and bf16
are off, which TRL has on by default: the update is faster so, and computes in float32 as ours does.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import step_work as work
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Clock(TrainerCallback):
    """Seconds of each step, and of the generation in it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.generation = 0.0
        self.start = 0.0
        self.start_cpu = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the first step."""
        self.start, self.start_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step."""
        now, now_cpu = time.perf_counter(), time.process_time()
        step = now - self.start
        self.steps.append(
            {
                "generation": self.generation,
                "update": step - self.generation,
                "step": step,
                "CPU": now_cpu - self.start_cpu,
            }
        )
        self.start, self.start_cpu, self.generation = now, now_cpu, 0.0


def force_tokens(script: list[list[list[int]]]) -> None:
    """Replace what `torch.multinomial` draws for the rows, after it has drawn."""
    draw, num_drawn = torch.multinomial, 0

    def drawn(probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_drawn
        sampled = draw(probs, *args, **kwargs)
        if len(sampled) == work.NUM_ROWS:
            turn, place = divmod(num_drawn, work.TURN_TOKENS)
            column = [rows[turn % work.NUM_TURNS][place] for rows in script]
            sampled = torch.tensor(column).unsqueeze(1)
            num_drawn += 1
        return sampled

    torch.multinomial = drawn


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "policy")
    tokenizer.response_template = qwen3_template
    num_digits = work.answer_digits(tokenizer)

    def lookup(key: str) -> str:
        """Look up a value.

        Args:
            key: Its key.
        """
        return work.digits(key, num_digits)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(i % 3) for i in range(len(completions))]

    args = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=8, gradient_accumulation_steps=2,
        num_generations=work.NUM_SAMPLES, max_completion_length=work.MAX_RESPONSE,
        max_steps=work.NUM_STEPS, shuffle_dataset=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, learning_rate=1e-6, beta=0.0, temperature=1.0,
    )  # fmt: skip
    rows = work.make_prompts(tokenizer, [lookup])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row} for row in rows * work.NUM_STEPS]),
        processing_class=tokenizer,
        tools=[lookup],
    )
    clock = Clock()
    trainer.add_callback(clock)
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        clock.generation += time.perf_counter() - start
        assert {len(ids) for ids in result[0]} == {work.PROMPT_TOKENS}
        assert {len(ids) for ids in result[1]} == {work.RESPONSE_TOKENS}
        assert {sum(mask) for mask in result[2]} == {work.NUM_TURNS * work.TURN_TOKENS}
        return result

    trainer._generate = timed
    force_tokens(work.make_script(tokenizer))
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"steps": clock.steps[1:], "peak_mib": peak, "load": os.getloadavg()[0]}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
