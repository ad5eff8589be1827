"""Seconds of each advantage estimator over the time to read its inputs once.

The batch is 1,024 sequences of 4,096 response positions in 256 groups of four: responses of one to
four thousand tokens, turns of the model and observations by turns, two thirds of the tokens
trained. What an estimator reads are the tensors among its arguments; reading them once is the sum
of each. Before each run, of an estimator and of the reading alike, a tensor larger than the caches
is overwritten, so that both find their inputs in memory. Each number is the smallest of several
runs.

Expectation before it was measured: an estimator that gives each row one number reads the rewards
and the mask, writes the advantages, and passes about five times over tensors of that size: within
20 times the reading. Those along tokens find the trained ones, move them together, sum them block
by block in float64, whiten and move them back, some twenty passes: within 60 times.

Run: python benchmarks/algorithms.py [repeats [name ...]]
"""

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import agentrl.algorithms  # noqa: F401  (registers the bundled estimators)
from agentrl.algorithms.advantages.registry import adv_estimator_names, get_adv_estimator_fn
from agentrl.config.schema.training import AlgorithmConfig

NUM_ROWS, WIDTH, NUM_GROUPS, TURN_TOKENS = 1024, 4096, 256, 128
REWARD_KEYS = ("format", "accuracy")
CACHE_BYTES = 2**29
AIM_BY_TOKEN, AIM = 60, 20
BY_TOKEN = {
    "gae", "gae_verl", "reinforce_plus_plus", "remax", "remax_verl", "turn_gae",
    "optimal_token_baseline", "optimal_token_baseline_verl", "tir_optimal_token_baseline",
    "tir_optimal_token_baseline_verl",
}  # fmt: skip
"""Those that run along tokens or whiten over them: the aim of `gae` is theirs."""


def make_columns() -> dict[str, Any]:
    """All that any estimator asks for. Every third turn is observed."""
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


def seconds(work: Callable[[], object], repeats: int, ballast: torch.Tensor) -> float:
    """The smallest wall time of some runs, each with its inputs out of the caches."""
    times: list[float] = []
    for _ in range(repeats):
        ballast.add_(1)
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main(repeats: int, names: Sequence[str]) -> None:
    """Print a line for each estimator."""
    columns, ballast = make_columns(), torch.zeros(CACHE_BYTES // 4)
    print(f"{torch.get_num_threads()} threads; milliseconds")
    print(f"{'estimator':32} {'reading':>8} {'all':>8} {'times':>6} {'aim':>4}")
    for name in names or adv_estimator_names():
        function = get_adv_estimator_fn(name)
        known = inspect.signature(function).parameters
        given = {key: value for key, value in columns.items() if key in known}
        inputs = [value for value in given.values() if isinstance(value, torch.Tensor)]
        reading = seconds(lambda read=inputs: [one.sum() for one in read], repeats, ballast)
        whole = seconds(lambda run=function, told=given: run(**told), repeats, ballast)
        aim = AIM_BY_TOKEN if name in BY_TOKEN else AIM
        print(f"{name:32} {1e3 * reading:8.1f} {1e3 * whole:8.1f} {whole / reading:6.1f} {aim:4}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:])
