"""A scored batch with everything that credit reads, and what each of two ranks computes of it."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.cli import leave_rank
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.protocol import DataProto
from agentrl.trainer.credit import COMPUTED, Credit
from agentrl.workers.distributed import World, start_world, stop_world

T = TypeVar("T")

NUM_ROWS, WIDTH = 7, 9
ADAPTIVE = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.01, "horizon": 100}
CONFIGS: dict[str, dict[str, Any]] = {
    "weights": {"rollout_correction": {"rollout_is": "turn", "rollout_is_batch_normalize": True}},
    "rejection": {
        "adv_estimator": "rloo",
        "rollout_correction": {
            "rollout_is": "sequence", "rollout_is_threshold": "0.6_1.6",
            "rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": "0.75_1.4,0.03",
        },
    },
    "turns": {"rollout_correction": {"rollout_rs": "turn_mean_k2", "rollout_rs_threshold": 0.03}},
    "kl": {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": ADAPTIVE},
    "kept": {
        "use_kl_in_reward": True, "kl_ctrl": ADAPTIVE,
        "rollout_correction": {
            "rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.03, "advantages": "kept",
        },
    },
    "all": {
        "use_kl_in_reward": True, "kl_ctrl": ADAPTIVE,
        "rollout_correction": {"preset": "decoupled_k3_rs_token_tis"},
    },
}  # fmt: skip
"""Credit of several kinds."""


def scored_batch() -> DataProto:
    """Rows of three groups in no order; in group `b` all score the same; one row is masked."""
    draw = torch.Generator().manual_seed(5)
    mask = torch.rand(NUM_ROWS, WIDTH, generator=draw).lt(0.7).long()
    mask[:, 0] = 1
    mask[4] = 0
    groups = ["a", "b", "a", "c", "c", "b", "a"]
    scores = torch.zeros(NUM_ROWS, WIDTH)
    scores[:, 0] = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 0.5, 1.0])
    old = -torch.rand(NUM_ROWS, WIDTH, generator=draw) * 2
    apart = torch.randn(2, NUM_ROWS, WIDTH, generator=draw) * 0.25
    turn_ids = (torch.arange(WIDTH) // 3).expand(NUM_ROWS, WIDTH).contiguous()
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": old,
            "rollout_log_probs": old + apart[0],
            "ref_log_prob": old + apart[1],
            "turn_ids": turn_ids,
            "in_baseline": torch.tensor([True] * NUM_ROWS),
            "batch_data_id": torch.tensor(["abc".index(name) for name in groups]),
            "values": torch.rand(NUM_ROWS, WIDTH, generator=draw),
            "sum_pi_squared": torch.rand(NUM_ROWS, WIDTH, generator=draw) + 1,
            "reward_baselines": torch.rand(NUM_ROWS, generator=draw),
            "state_ids": turn_ids % 2,
        },
        {
            "uid": np.array(groups, dtype=object),
            "reward_extra_info": [{"style": row % 3, "length": row} for row in range(NUM_ROWS)],
        },
    )


def credited(world: World, **keys: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What credit makes of `scored_batch`."""
    batch = scored_batch()
    figures = Credit(AlgorithmConfig.model_validate(keys), world).compute(batch)
    return dict(batch.batch.items()), figures


def my_rows(world: World) -> list[int]:
    """Alone all of them; of two ranks unequal shares, with members of each group on both."""
    if world.is_alone:
        return list(range(NUM_ROWS))
    return [0, 1] if world.is_main else [2, 3, 4, 5, 6]


Credited = tuple[dict[str, Tensor], dict[str, float]]
"""What each of a rank's rows was given, under `column/row`, and the figures."""


def credit_rows(world: World, keys: dict[str, Any]) -> Credited:
    """Give a rank's rows credit, and let the weight of the KL move."""
    rows = my_rows(world)
    batch = scored_batch().select_idxs(np.array(rows))
    credit = Credit(AlgorithmConfig.model_validate(keys), world)
    figures = credit.compute(batch)
    credit.commit()
    given = {
        f"{key}/{row}": values.clone()
        for key in COMPUTED
        for row, values in zip(rows, batch.batch.get(key, torch.zeros(0)), strict=False)
    }
    return given, figures | credit.state_dict()


class Table:
    """Where ranks that are threads of one process lay what all are to see."""

    def __init__(self, size: int) -> None:
        self._seats: list[Any] = [None] * size
        self._barrier = Barrier(size, timeout=20)

    def exchange(self, rank: int, item: T) -> list[T]:
        self._seats[rank] = item
        self._barrier.wait()
        items = list(self._seats)
        self._barrier.wait()
        return items


@dataclass(frozen=True, slots=True)
class ThreadWorld(World):
    """A rank that is a thread."""

    table: Table = field(kw_only=True)

    def gather(self, item: T) -> list[T]:
        return self.table.exchange(self.rank, item)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self.gather(rows))


def credit_on_two_threads(world: World, keys: dict[str, Any]) -> list[Credited]:
    """Let two threads of one process be the ranks."""
    table = Table(2)
    ranks = [
        ThreadWorld(n, 2, world.device, world.mesh, world.status, table=table) for n in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: credit_rows(rank, keys), ranks))


def run(world: World, folder: Path) -> None:
    """Write what credit adds to each row, its figures and the next weight of the KL."""
    tensors: dict[str, Tensor] = {}
    figures: dict[str, dict[str, float]] = {}
    for name, keys in CONFIGS.items():
        given, figures[name] = credit_rows(world, keys)
        tensors |= {f"{name}/{key}": values for key, values in given.items()}
    save_file(tensors, folder / f"tensors_{world.rank}.safetensors")
    (folder / f"figures_{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(start_world("cpu", timeout_s=60), Path(sys.argv[1]))
    stop_world()
    leave_rank(SystemExit(0))
