"""What each rank of `tests/workers/test_checkpoint_ranks.py` runs: saves, loads and faults."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from agentrl.cli import leave_rank
from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import AgentRLError
from agentrl.protocol import DataProto
from agentrl.remote_io import Location, RemotePath
from agentrl.workers import checkpoint_writer, snapshot
from agentrl.workers.actor import Actor
from agentrl.workers.checkpoint import RunState
from agentrl.workers.checkpoint_writer import CheckpointWriter, copy_to_host
from agentrl.workers.critic import Critic
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import local_slice
from agentrl.workers.snapshot import (
    find_latest,
    identify,
    load_run,
    save_run,
    start_save,
    verify_together,
)
from tests.fakes.families import FAMILIES
from tests.fakes.fault_runs import limit_file_size
from tests.fakes.training import make_actor, make_batch, make_lora_policy, make_policy, random_rows
from tests.fakes.value_equality import make_critic

OPTIMIZERS = ("adamw", "muon", "muon_experts", "lora", "critic")
"""Optimizers, Muon of experts, and with AdamW: LoRA, and a policy with a critic."""
LARGE = 30_000
"""Bytes that a rank's file has at least."""


def new_actor(world: World, optimizer: str, *, seed: int = 0) -> Actor:
    """An actor without a step."""
    if optimizer == "lora":
        return make_actor(make_lora_policy(world, seed=seed), optim={"lr": 1e-2})
    name = "adamw" if optimizer == "critic" else optimizer.removesuffix("_experts")
    optim = {"name": name, "lr": 1e-2, "muon_lr": 1e-2}
    if optimizer == "muon_experts":
        lm = FAMILIES["qwen3_moe"].model()
        return make_actor(PolicyModel(lm, world, torch.float32, FsdpConfig()), optim=optim)
    return make_actor(make_policy(world, seed=seed), optim=optim)


def new_critic(world: World, optimizer: str, *, seed: int = 0) -> Critic | None:
    """A critic without a step, if there is one next to the actor."""
    return make_critic(world, seed=seed) if optimizer == "critic" else None


def some_batch(world: World) -> DataProto:
    """Rows of this rank."""
    return make_batch(random_rows(4, seed=world.rank))


def some_returns(world: World) -> DataProto:
    """Rows of this rank with returns."""
    batch = some_batch(world)
    shape, draw = batch.batch["response_mask"].shape, torch.Generator().manual_seed(world.rank)
    values = {name: torch.randn(shape, generator=draw) for name in ("values", "returns")}
    return batch.union(DataProto.from_dict(values))


def trained(world: World, optimizer: str) -> Actor:
    """An actor after one step."""
    actor = new_actor(world, optimizer)
    actor.update_policy(some_batch(world), temperature=1.0)
    return actor


def state_of(step: int, actor: Actor) -> RunState:
    """A run's state without a trainer."""
    return RunState(step, identify(actor.policy))


def save_all(world: World, folder: Location) -> None:
    """Save an actor of each optimizer."""
    for optimizer in OPTIMIZERS:
        actor, critic = trained(world, optimizer), new_critic(world, optimizer)
        if critic is not None:
            critic.update_critic(some_returns(world))
        save_run(folder / optimizer, actor, state_of(1, actor), critic=critic)


def resave_all(world: World, source: Location, folder: Location) -> None:
    """Load the checkpoints that other ranks saved, and save them from these ranks."""
    for optimizer in OPTIMIZERS:
        actor = new_actor(world, optimizer, seed=5)
        critic = new_critic(world, optimizer, seed=5)
        load_run(verify_together(source / optimizer / "global_step_1", world), actor, critic)
        save_run(folder / optimizer, actor, state_of(1, actor), critic=critic)


def harm(path: Path, how: Callable[[Path], None], world: World) -> None:
    """Let the last rank harm a file."""
    if world.rank == world.size - 1:
        how(path)
    world.gather(None)


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def meet_faults(world: World, folder: Path) -> dict[str, Any]:
    """Save to a full disk; find what is left after harm; return what each rank saw."""
    seen: dict[str, Any] = {}
    actor = trained(world, "adamw")
    root = folder / "faults"
    save_run(root, actor, state_of(1, actor))
    save_run(root, actor, state_of(2, actor))
    for full in range(world.size):
        with limit_file_size(LARGE // 10 if world.rank == full else None):
            try:
                save_run(root, actor, state_of(3, actor))
            except AgentRLError as error:
                seen[f"disk of rank {full} is full"] = f"{type(error).__name__}: {error}"
        world.gather(None)
        seen[f"after {full}"] = sorted(path.name for path in root.iterdir())
    running = start_save(root, actor, state_of(4, actor))
    while not running.is_done():
        pass
    seen["finished"] = running.finish().name
    for name, how in (("rank_1", flip_last_byte), ("rank_0", Path.unlink)):
        newest = find_latest(root, world)
        assert newest is not None
        harm(newest.path / f"{name}.safetensors", how, world)
    newest = find_latest(root, world)
    assert newest is not None
    seen["latest"] = newest.path.name
    return seen


def save_to_store(world: World, root: RemotePath) -> dict[str, Any]:
    """Save to a store; lose the file of the last rank; save again. Return what each rank saw."""
    resave_all(world, root / "one", root / "two_of_one")
    save_all(world, root / "two")
    seen: dict[str, Any] = {}
    actor, faults = trained(world, "adamw"), root / "faults"
    save_run(faults, actor, state_of(1, actor))
    upload = CheckpointWriter.write_rank
    if world.rank == world.size - 1:
        CheckpointWriter.write_rank = lambda *_: None
    running = start_save(faults, actor, state_of(2, actor))
    running.writer.patience_s = 0.5
    try:
        running.finish()
    except AgentRLError as error:
        seen["lost"] = str(error)
    CheckpointWriter.write_rank = upload
    newest = find_latest(faults, world)
    assert newest is not None
    seen["latest"] = newest.path.name
    save_run(faults, actor, state_of(3, actor))
    seen["kept"] = [folder.name for folder in faults.folders()]
    return seen


def count_copies(world: World) -> dict[str, Any]:
    """Which rank of a 2 x 2 mesh writes which replicated slice."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = [torch.arange(10.0).reshape(5, 2) + number for number in range(6)]
    sharded = [distribute_tensor(one, mesh, [Replicate(), Shard(0)]) for one in whole]
    slices = {f"weight/{n}": local_slice(one, world) for n, one in enumerate(sharded)}
    slices["step/w"] = local_slice(torch.tensor(1.0), world)
    return {name: one._asdict() for name, one in copy_to_host(slices, world.rank).slices.items()}


def die_in_write(world: World, folder: Path, rank: int) -> None:
    """Save once; then a rank is killed while its thread writes."""
    actor = trained(world, "adamw")
    save_run(folder / "killed", actor, state_of(1, actor))
    checkpoint_writer.GRACE_S = snapshot.GRACE_S = 0.3  # pyright: ignore[reportConstantRedefinition]
    write = checkpoint_writer._write_file

    def killed(path: Path, pieces: Any) -> Any:
        path.write_bytes(next(iter(pieces)))
        os.kill(os.getpid(), signal.SIGKILL)
        return write(path, pieces)

    if world.rank == rank:
        checkpoint_writer._write_file = killed
    running = start_save(folder / "killed", actor, state_of(2, actor))
    with world.status.explain_errors():
        running.finish()


def main(task: str, folder: Path, *rest: str) -> None:
    torch.set_num_threads(1)
    world = start_world("cpu", timeout_s=60)
    seen: dict[str, Any] = {}
    if task == "two":
        resave_all(world, folder / "one", folder / "two_of_one")
        save_all(world, folder / "two")
        seen = meet_faults(world, folder)
    elif task == "remote":
        seen = save_to_store(world, RemotePath(rest[0]))
    elif task == "four":
        resave_all(world, folder / "two", folder / "four_of_two")
        seen = count_copies(world)
    else:
        die_in_write(world, folder, int(rest[0]))
    (folder / f"{task}_{world.rank}.json").write_text(json.dumps(seen))
    stop_world()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except AgentRLError as error:
        print(type(error).__name__, error, file=sys.stderr)
        leave_rank(SystemExit(2))
    leave_rank(SystemExit(0))
