"""What each rank of `tests/workers/test_distributed.py` runs: one batch, its share of the rows."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file

from agentrl.algorithms import register_adv_est
from agentrl.cli import leave_rank
from agentrl.config.schema.training import AlgorithmConfig, LossAggMode, OptimConfig
from agentrl.protocol import DataProto
from agentrl.trainer.credit import Credit
from agentrl.workers.checkpoint import RunState
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.snapshot import identify, load_run, save_run, verify_together
from agentrl.workers.weight_sync import iter_full_weights
from tests.fakes.training import (
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
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "grad_clip": 0.05}
ESTIMATORS = ("grpo", "grpo_verl", "whitened_over_all_rows")


@register_adv_est("whitened_over_all_rows")
def whiten(batch: Any, non_tensor_batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimator that looks at every row, and at whatever columns there are."""
    mask = batch["response_mask"].bool()
    scores = batch["token_level_rewards"].sum(-1)
    longest = max(len(name) for name in non_tensor_batch["request_id"])
    white = (scores - scores.mean()) / (scores.std() + longest)
    advantages = torch.where(mask, white[:, None], 0.0)
    return advantages, advantages


def share(world: World) -> DataProto:
    """Unequal shares: on two ranks three rows and five, a group's members on both."""
    if world.is_alone:
        return make_batch(ROWS)
    rows = np.arange(3) if world.is_main else np.arange(3, len(ROWS))
    return make_batch(ROWS).select_idxs(rows)


def places(world: World, *, second: bool) -> list[int]:
    """Rows of another dealing: unequal again, or all of them on the first rank."""
    if world.is_alone:
        return list(range(len(ROWS)))
    first = list(range(len(ROWS))) if second else [0, 2, 3, 5, 7]
    return first if world.is_main else [row for row in range(len(ROWS)) if row not in first]


def rewarded(rows: list[int]) -> DataProto:
    """Rows with rewards and a reference, laid out as wide as all of them."""
    batch = make_batch(ROWS)
    draw = np.random.default_rng(1)
    shape = batch.batch["response_mask"].shape
    batch.batch["token_level_scores"] = torch.tensor(draw.normal(size=shape), dtype=torch.float32)
    batch.batch["ref_log_prob"] = torch.tensor(draw.normal(-4, 1, size=shape), dtype=torch.float32)
    batch.batch["in_baseline"] = torch.tensor([row != 4 for row in range(len(ROWS))])
    # In the batch's order the groups are g1, g0, g2, whatever the order of the rows.
    order = [[1, 0, 2][int(row.uid[1])] for row in ROWS]
    batch.batch["batch_data_id"] = torch.tensor(order)
    del batch.batch["advantages"]
    return batch.select_idxs(np.array(rows, dtype=np.int64))


def credit_and_terms(world: World, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Advantages of groups on two ranks, and the gradients and steps that follow from them."""
    metrics: dict[str, dict[str, float]] = {}
    for second in (False, True):
        rows = places(world, second=second)
        for name in ESTIMATORS:
            batch = rewarded(rows)
            Credit(AlgorithmConfig(adv_estimator=name), world).compute(batch)
            for row, values in zip(rows, batch.batch["advantages"], strict=True):
                tensors[f"credit/{second}/{name}/{row}"] = values.clone()
        actor = make_actor(make_policy(world), Layout(budget=12), ppo_mini_batch_size=1, **TERMS)
        trap = GradientTrap(actor)
        metrics[f"terms/{second}"] = actor.update_policy(batch, temperature=0.9).metrics
        for step, seen in enumerate(trap.seen):
            tensors |= {f"terms/{second}/{step}/{name}": grad for name, grad in seen.items()}
        actor = make_actor(make_policy(world), ppo_epochs=2, **TERMS)
        actor.update_policy(batch, temperature=1.0)
        for name, weight in iter_full_weights(actor.policy):
            tensors[f"clipped/{second}/{name}"] = weight.clone()
    return metrics


def update_with_one_signal(world: World) -> dict[str, float]:
    """Train on mini-batches of one group each; one row of the last rank has an advantage."""
    batch = share(world)
    batch.batch["advantages"].zero_()
    if world.rank == world.size - 1:
        batch.batch["advantages"][-1] = 1.0
    actor = make_actor(make_policy(world), ppo_mini_batch_size=1)
    return actor.update_policy(batch, temperature=1.0).metrics


def run(world: World, folder: Path) -> None:
    """Write gradients by mode, weights after some steps, metrics, skips and a checkpoint."""
    batch = share(world)
    tensors: dict[str, torch.Tensor] = {}
    metrics = credit_and_terms(world, tensors)
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
        load_run(verify_together(path, world), again)
        whole_batch = actor.updater.config.model_copy(update={"ppo_mini_batch_size": None})
        for one in (actor, again):
            one.updater.config = whole_batch
            one.update_policy(batch, temperature=1.0)
        for key, one in (("", actor), ("resumed/", again)):
            whole = dict(iter_full_weights(one.policy))
            tensors |= {f"{name}/{key}{place}": w.clone() for place, w in whole.items()}
    metrics["one group with a signal"] = update_with_one_signal(world)
    if world.rank == world.size - 1:
        batch.batch["advantages"][-1] = float("nan")
    skipped = make_actor(make_policy(world)).update_policy(batch, temperature=1.0).skipped
    metrics["skipped"] = {str(one.request_ids): 1.0 for one in skipped}
    save_file(tensors, folder / f"tensors_{world.rank}.safetensors")
    (folder / f"metrics_{world.rank}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(start_world("cpu", timeout_s=60), Path(sys.argv[1]))
    stop_world()
    leave_rank(SystemExit(0))
