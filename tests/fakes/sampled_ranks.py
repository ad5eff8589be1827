"""Ranks for `tests/trainer/test_sampled_order.py`: each takes the batches of one sampler."""

import json
import os
import sys
from pathlib import Path

import torch

from agentrl.protocol import DataProto
from agentrl.workers.distributed import start_world
from tests.trainer.test_sampled_order import make


def main(folder: Path, name: str) -> None:
    world = start_world("cpu", timeout_s=60)
    order, found = make(folder, name, world), list[list[int]]()
    for step in range(6):
        if step == 4:  # resume from the state of this rank
            state = order.state_dict()
            order = make(folder, name, world)
            order.load_state_dict(state)
        rows = order.next_batch(3)
        found.append(rows)
        part = rows[:2] if world.is_main else rows[2:]
        order.update(DataProto.from_dict({"rows": torch.tensor(part)}))
    (folder / f"{world.rank}.json").write_text(json.dumps([found, order.epoch, order.position]))
    world.gather(None)
    os._exit(0)  # see `agentrl.cli.leave_rank`


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
