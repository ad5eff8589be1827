"""What each rank of `tests/workers/test_weight_sync.py` runs: syncs to engines that fail."""

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from agentrl.cli import leave_rank
from agentrl.engines.protocol import SyncFigures
from agentrl.errors import AgentRLError, EngineError
from agentrl.workers.distributed import World, start_world
from agentrl.workers.weight_sync import iter_full_weights, sync_weights
from tests.fakes.training import make_policy


class FailingEngine:
    """An engine that only takes weights, and fails in the middle of its first updates."""

    def __init__(self, *, num_failures: int = 0, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.loads_tower = False
        self.num_updates = 0
        self.version = -1
        self.taken: dict[str, torch.Tensor] = {}
        self._num_failures = num_failures

    async def follow_update(self, *, version: int) -> None:
        self.version = version

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> SyncFigures:
        self.num_updates += 1
        self.taken = {}
        figures = SyncFigures()
        for name, tensor in named_tensors:
            self.taken[name] = tensor
            figures.add(tensor.nbytes)
            if len(self.taken) == 3 and self.num_updates <= self._num_failures:
                raise EngineError(f"full at update {self.num_updates}")
        self.version = version
        return figures


def outcome(world: World, engine: Any, **settings: Any) -> dict[str, Any]:
    """Sync a policy of two shards; say what became of it on this rank."""
    policy = make_policy(world)
    error, result = None, None
    try:
        result = asyncio.run(sync_weights(policy, engine, version=7, **settings))
    except AgentRLError as raised:
        error = f"{type(raised).__name__}: {raised.args[0]}"
    whole = dict(iter_full_weights(policy))
    return {
        "error": error,
        "attempts": result and result.num_attempts,
        "bytes": result and result.num_bytes,
        "updates": engine.num_updates,
        "version": engine.version,
        "is_whole": engine.taken.keys() == whole.keys()
        and all(torch.equal(engine.taken[name], whole[name]) for name in whole),
    }


def main(folder: Path) -> None:
    world = start_world("cpu", timeout_s=60)
    fails = 0 if world.is_main else 1
    outcomes = {
        "mended": outcome(world, FailingEngine(num_failures=fails), max_attempts=2),
        "given up": outcome(world, FailingEngine(num_failures=2 * fails), max_attempts=2),
        "shared": outcome(world, FailingEngine(is_shared=True)),
        "shared, mended": outcome(
            world, FailingEngine(is_shared=True, num_failures=1), max_attempts=3
        ),
    }
    (folder / f"outcomes_{world.rank}.json").write_text(json.dumps(outcomes))
    leave_rank(SystemExit(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
