"""Time of each advantage estimator over the time to copy one tensor of the batch.

The batch is 1,024 sequences of 4,096 response positions in 256 groups of four: responses of one to
four thousand tokens, turns of the model and observations by turns, two thirds of the tokens
trained. The copy is `torch.clone` of the rewards, 16 MiB in float32. Copy and estimator alternate;
before each of them, a tensor larger than the caches is overwritten, so that both find their inputs
in memory. The allocator keeps freed memory, as in training. The table shows the smallest of several
runs: wall time, and CPU time of all threads, which other load changes less.

Expectation before it was measured: an estimator that gives each row one number reads the rewards
and the mask (two copies long in int64) and writes the advantages, in some ten passes over memory:
at most 20 copies. Those along tokens take the trained ones, sum them block by block, whiten them
and put them back, some thirty passes: at most 60 copies. With two idle cores, `gae` takes at most
20 ms and `grpo` at most 4 ms.

Run: python benchmarks/algorithms.py [--repeats N] [--threads N] [name ...]
"""

import argparse
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import agentrl.algorithms  # noqa: F401  (registers the bundled estimators)
from agentrl.algorithms.advantages.registry import adv_estimator_names, get_adv_estimator_fn
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.workers.memory import keep_freed_memory

NUM_ROWS, WIDTH, NUM_GROUPS, TURN_TOKENS = 1024, 4096, 256, 128
REWARD_KEYS = ("format", "accuracy")
CACHE_BYTES = 2**29
AIM_BY_TOKEN, AIM = 60, 20
BY_TOKEN = {
    "gae", "gae_verl", "reinforce_plus_plus", "remax", "remax_verl", "turn_gae",
    "optimal_token_baseline", "optimal_token_baseline_verl", "tir_optimal_token_baseline",
    "tir_optimal_token_baseline_verl",
}  # fmt: skip
"""Estimators along tokens, or that whiten over tokens: they have the aim of `gae`."""


def make_columns() -> dict[str, Any]:
    """Make the columns that estimators read. Every third turn is observed."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, WIDTH)
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (NUM_ROWS, 1), generator=generator)
    places = torch.arange(WIDTH).expand(shape)
    turn_ids = torch.where(places < lengths, places // TURN_TOKENS, -1)
    mask = ((turn_ids >= 0) & (turn_ids % 3 != 2)).long()

    def draw() -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    rewards = torch.where((places % TURN_TOKENS == 0) & (mask == 1), draw(), 0.0)
    config = AlgorithmConfig(gamma=0.99, lam=0.95, gdpo_reward_keys=REWARD_KEYS)
    scorer = torch.rand(NUM_ROWS, len(REWARD_KEYS), generator=generator).tolist()
    return {name: getattr(config, name) for name in type(config).model_fields} | {
        "token_level_rewards": rewards,
        "token_level_scores": rewards,
        "response_mask": mask,
        "turn_ids": turn_ids,
        "state_ids": torch.where(mask == 1, turn_ids % 5, -1),
        "values": draw(),
        "old_log_probs": -draw(),
        "sum_pi_squared": draw(),
        "reward_baselines": draw()[:, 0],
        "in_baseline": torch.ones(NUM_ROWS, dtype=torch.bool),
        "index": np.array([f"prompt-{row % NUM_GROUPS}" for row in range(NUM_ROWS)], dtype=object),
        "non_tensor_batch": {
            "reward_extra_info": np.array(
                [dict(zip(REWARD_KEYS, row, strict=True)) for row in scorer]
            )
        },
        "config": config,
    }


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the CPU time of one run, in seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(name: str, columns: dict[str, Any], repeats: int, ballast: torch.Tensor) -> str:
    """Return the line of an estimator."""
    function = get_adv_estimator_fn(name)
    known = inspect.signature(function).parameters
    given = {key: value for key, value in columns.items() if key in known}
    rewards = columns["token_level_rewards"]
    copies: list[tuple[float, float]] = []
    runs: list[tuple[float, float]] = []
    for _ in range(repeats):
        ballast.add_(1)
        copies.append(measure(rewards.clone))
        ballast.add_(1)
        runs.append(measure(lambda: function(**given)))
    copy, copy_cpu = (min(times) for times in zip(*copies, strict=True))
    wall, cpu = (min(times) for times in zip(*runs, strict=True))
    aim = AIM_BY_TOKEN if name in BY_TOKEN else AIM
    return (
        f"{name:34} {1e3 * copy:7.2f} {1e3 * wall:8.2f} {wall / copy:7.1f} "
        f"{1e3 * cpu:8.2f} {cpu / copy_cpu:7.1f} {aim:4}"
    )


def main() -> None:
    """Print a line for each estimator."""
    parser = argparse.ArgumentParser(description="Time of advantage estimators.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    columns, ballast = make_columns(), torch.zeros(CACHE_BYTES // 4)
    print(f"{asked.threads} threads; milliseconds, and times the copy")
    print(
        f"{'estimator':34} {'copy':>7} {'wall':>8} {'times':>7} {'CPU':>8} {'times':>7} {'aim':>4}"
    )
    for name in asked.names or adv_estimator_names():
        print(compare(name, columns, asked.repeats, ballast), flush=True)
    print(f"load: {os.getloadavg()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
