"""A scored batch with everything that credit reads, and what each of two ranks computes of it."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from agentrl.cli import leave_rank
from agentrl.config.schema import AlgorithmConfig
from agentrl.protocol import DataProto
from agentrl.trainer.credit import COMPUTED, Credit
from agentrl.training.distributed import World, start_world, stop_world

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
    "kl": {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": ADAPTIVE},
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
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": old,
            "rollout_log_probs": old + apart[0],
            "ref_log_prob": old + apart[1],
            "turn_ids": (torch.arange(WIDTH) // 3).expand(NUM_ROWS, WIDTH).contiguous(),
            "in_baseline": torch.tensor([True] * NUM_ROWS),
            "batch_data_id": torch.tensor(["abc".index(name) for name in groups]),
        },
        {"uid": np.array(groups, dtype=object)},
    )


def my_rows(world: World) -> list[int]:
    """Alone all of them; of two ranks unequal shares, with members of each group on both."""
    if world.is_alone:
        return list(range(NUM_ROWS))
    return [0, 1] if world.is_main else [2, 3, 4, 5, 6]


def run(world: World, folder: Path) -> None:
    """Write what credit adds to each row, its figures and the next weight of the KL."""
    tensors: dict[str, torch.Tensor] = {}
    figures: dict[str, dict[str, float]] = {}
    rows = my_rows(world)
    for name, keys in CONFIGS.items():
        batch = scored_batch().select_idxs(np.array(rows))
        credit = Credit(AlgorithmConfig.model_validate(keys), world)
        figures[name] = credit.compute(batch)
        credit.commit()
        figures[name] |= credit.state_dict()
        for key in COMPUTED:
            for row, values in zip(rows, batch.batch.get(key, torch.zeros(0)), strict=False):
                tensors[f"{name}/{key}/{row}"] = values.clone()
    save_file(tensors, folder / f"tensors_{world.rank}.safetensors")
    (folder / f"figures_{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(start_world("cpu", timeout_s=60), Path(sys.argv[1]))
    stop_world()
    leave_rank(SystemExit(0))
