"""One of four ranks of `tests/workers/test_row_exchange.py`: rows go out and results come back."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from agentrl.cli import leave_rank
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.row_exchange import plan_exchange

LENGTHS = [[9, 1, 5, 2], [3, 3], [], [7]]
"""Tokens of the rows of each rank."""
GROUPS = [["a", "a", "b", "b"], ["c", "c"], [], ["c"]]
MINI_BATCHES = [[[0, 1], [2, 3]], [[0], [1]], [[], []], [[0], []]]


class PairedWorld(World):
    """Two ranks compute the same rows."""

    @property
    def dp_size(self) -> int:
        """Half of the ranks."""
        return self.size // 2


def travel(world: World) -> dict[str, Any]:
    """Send rows with their global names, and send back a result that names row and computer."""
    lengths = LENGTHS[world.rank]
    exchange = plan_exchange(world, lengths, GROUPS[world.rank], MINI_BATCHES[world.rank])
    names = 100 * world.rank + torch.arange(len(lengths))
    computed = exchange.send(names.view(-1, 1))
    results = torch.cat([computed * 2, torch.full_like(computed, world.rank)], dim=1)
    return {
        "computed": computed.flatten().tolist(),
        "mini_batches": [computed[rows].flatten().tolist() for rows in exchange.mini_batches],
        "results": exchange.send_back(results).tolist(),
        "bits": exchange.send(names.ge(0)).tolist(),
    }


def run(folder: Path) -> None:
    """Write what this rank saw with four data-parallel groups, and with two."""
    world = start_world("cpu", timeout_s=60)
    paired = PairedWorld(*(getattr(world, field.name) for field in fields(world)))
    found = {"single": travel(world), "paired": travel(paired)}
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    stop_world()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
    leave_rank(SystemExit(0))
