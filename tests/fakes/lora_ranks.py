"""What each rank of `tests/workers/test_lora.py` runs: a policy with LoRA from file to engine."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.cli import leave_rank
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.protocol import SyncFigures
from agentrl.protocol import DataProto
from agentrl.workers.checkpoint import RunState
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.export import export_adapter, export_hf
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel
from agentrl.workers.scoring import Reference
from agentrl.workers.snapshot import identify, load_run, save_run, verify_together
from agentrl.workers.weight_sync import sync_weights
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.training import make_actor, make_batch, random_rows, whole

RANK_CASES = {"sharded": FsdpConfig(), "copies": FsdpConfig(fsdp_size=1),
              "offloaded": FsdpConfig(offload_policy=True)}  # fmt: skip
SEED = 3


class TakingEngine:
    """An engine that only keeps the weights it gets."""

    is_shared = False

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> SyncFigures:
        self.taken = {name: tensor.clone() for name, tensor in named_tensors}
        return SyncFigures()


def take_weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return the weights that an engine gets."""
    engine: Any = TakingEngine()
    asyncio.run(sync_weights(policy, engine, version=1))
    return engine.taken


def adapters_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: whole(weight.detach()).clone() for name, weight in policy.trained_weights()}


def share(world: World) -> DataProto:
    """This rank's rows of the batch of all ranks."""
    rows = make_batch(random_rows(8))
    start, end = (8 * rank // world.size for rank in (world.rank, world.rank + 1))
    return rows.select_idxs(np.arange(start, end))


def run_policy(world: World, model: ModelConfig, fsdp: FsdpConfig, folder: Path) -> dict[str, Any]:
    """Load, train, sync, save, resume and export; return what the rank saw."""
    policy = load_policy(model, world, fsdp, seed=SEED)
    first = adapters_of(policy)
    actor = make_actor(policy, optim={"lr": 1e-2})
    before = actor.compute_log_probs(share(world), temperature=1.0).log_probs
    for _ in range(2):
        actor.update_policy(share(world), temperature=1.0)
    after = actor.compute_log_probs(share(world), temperature=1.0).log_probs
    reference = Reference(policy, budget=None)
    at_start = reference.compute_ref_log_prob(share(world), temperature=1.0)
    path = save_run(folder / "checkpoints", actor, RunState(2, identify(policy)))
    resumed = make_actor(load_policy(model, world, fsdp, seed=SEED + 1), optim={"lr": 1e-2})
    load_run(verify_together(path, world), resumed)
    for one in (actor, resumed):
        one.update_policy(share(world), temperature=1.0)
    export_hf(policy, tiny_tokenizer(), folder / "merged")
    export_adapter(policy, tiny_tokenizer(), folder / "adapter")
    return {
        "first": first,
        "trained": adapters_of(policy),
        "resumed": adapters_of(resumed.policy),
        "engine": take_weights(policy),
        "base": policy.adapters and policy.adapters.base_digest,
        "change": float((after - before).abs().max()),
        "drift_of_reference": float((at_start - before).abs().max()),
    }


def run(model: Path, folder: Path) -> None:
    """Write what this rank saw in each case."""
    world = start_world("cpu", timeout_s=60)
    found = {
        name: run_policy(world, ModelConfig(path=str(model), lora_rank=4), fsdp, folder / name)
        for name, fsdp in RANK_CASES.items()
    }
    torch.save(found, folder / f"rank_{world.rank}.pt")
    stop_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]))
    leave_rank(SystemExit(0))
