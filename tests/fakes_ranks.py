"""What each rank of `tests/training/test_ranks.py` runs: one batch, its share of the rows."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save_file

from agentrl.config.schema import LossAggMode, OptimConfig
from agentrl.training.checkpoint import RunState
from agentrl.training.distributed import World, start_world, stop_world
from agentrl.training.snapshot import identify, load_run, save_run
from agentrl.training.weight_sync import iter_full_weights
from tests.fakes_training import (
    GradientTrap,
    Layout,
    Row,
    make_actor,
    make_batch,
    make_policy,
    random_rows,
)

ROWS = [*random_rows(7, group=3), Row([1, 2], [3, 4, 5], [1, 0, 1], "g0")]
MODES = get_args(LossAggMode)


def share(world: World) -> list[Row]:
    """Unequal shares: on two ranks three rows and five, a group's members on both."""
    if world.is_alone:
        return ROWS
    return ROWS[:3] if world.is_main else ROWS[3:]


def run(world: World, folder: Path) -> None:
    """Write gradients by mode, weights after some steps, metrics, skips and a checkpoint."""
    batch = make_batch(share(world))
    tensors: dict[str, torch.Tensor] = {}
    metrics: dict[str, dict[str, float]] = {}
    for mode in MODES:
        actor = make_actor(make_policy(world), Layout(budget=20), loss_agg_mode=mode)
        trap = GradientTrap(actor)
        metrics[mode] = actor.update_policy(batch, temperature=0.9).metrics
        tensors |= {f"{mode}/{name}": grad for name, grad in trap.seen[0].items()}
    for name in ("adamw", "muon"):
        optim = OptimConfig(name=name, lr=1e-3, muon_lr=1e-3)
        actor = make_actor(make_policy(world), optim=optim, ppo_epochs=2, ppo_mini_batch_size=2)
        actor.update_policy(batch, temperature=1.0)
        path = save_run(folder / name, actor, RunState(1, identify(actor.policy)))
        again = make_actor(make_policy(world, seed=3), optim=optim)
        load_run(path, again)
        for one in (actor, again):
            one.config = actor.config.model_copy(update={"ppo_mini_batch_size": None})
            one.update_policy(batch, temperature=1.0)
        for key, one in (("", actor), ("resumed/", again)):
            whole = dict(iter_full_weights(one.policy))
            tensors |= {f"{name}/{key}{place}": w.clone() for place, w in whole.items()}
    if world.rank == world.size - 1:
        batch.batch["advantages"][-1] = float("nan")
    skipped = make_actor(make_policy(world)).update_policy(batch, temperature=1.0).skipped
    metrics["skipped"] = {str(asdict(one)["request_ids"]): 1.0 for one in skipped}
    save_file(tensors, folder / f"tensors_{world.rank}.safetensors")
    (folder / f"metrics_{world.rank}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(start_world("cpu", timeout_s=60), Path(sys.argv[1]))
    stop_world()
