"""An actor -> what a checkpoint holds of it, and back. Every function is a collective."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedTokenizerBase

from agentrl.training.actor import Actor
from agentrl.training.checkpoint import (
    ModelIdentity,
    RunState,
    Snapshot,
    load_checkpoint,
    save_checkpoint,
)
from agentrl.training.model import PolicyModel
from agentrl.training.rng import RandomState, capture_random_state, restore_random_state
from agentrl.training.weight_sync import iter_full_weights


def identify(policy: PolicyModel) -> ModelIdentity:
    """Say which model this is."""
    shapes = {name: list(weight.shape) for name, weight in policy.named_weights()}
    return ModelIdentity(type(policy.lm).__name__, shapes)


def save_run(root: Path, actor: Actor, state: RunState, *, keep: int | None = None) -> Path:
    """Write a checkpoint of the run; the main rank writes, all wait until it stands.

    Args:
        root: The folder of the run's checkpoints.
        actor: Weights and moments.
        state: The trainer's part; the actor's counters and the random streams are added.
        keep: Complete checkpoints to keep.

    Raises:
        CheckpointError: on every rank, where it cannot be written.
    """
    world = actor.world
    streams = [asdict(one) for one in world.gather(capture_random_state())]
    state = replace(
        state, actor=asdict(actor.counters()), random=streams, identity=identify(actor.policy)
    )
    snapshot = Snapshot(
        state=state,
        model=dict(iter_full_weights(actor.policy)),
        optimizer=actor.optimizer.state_tensors(),
    )
    outcome: Path | Exception | None = None
    if world.is_main:
        try:
            outcome = save_checkpoint(root, snapshot, keep=keep)
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            outcome = error
    outcome = world.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None
    return outcome


def load_run(path: Path, actor: Actor) -> RunState:
    """Put an actor and this rank's random streams to where a checkpoint was written.

    Raises:
        CheckpointError: where it is incomplete, damaged, of another model or another optimizer;
            nothing has changed then.
    """
    snapshot = load_checkpoint(path, identify(actor.policy))
    counters = snapshot.state.actor
    actor.optimizer.load_state_tensors(snapshot.optimizer, counters["num_optimizer_steps"])
    actor.num_updates = counters["num_updates"]
    load_weights(actor.policy, snapshot.model)
    streams = snapshot.state.random
    if actor.world.rank < len(streams):
        restore_random_state(RandomState(**streams[actor.world.rank]))
    return snapshot.state


@torch.no_grad()
def load_weights(policy: PolicyModel, weights: dict[str, torch.Tensor]) -> None:
    """Copy whole weights into the policy's own memory, each rank its shard."""
    for name, weight in policy.named_weights():
        whole = weights[name].to(weight.device)
        if isinstance(weight, DTensor):
            shard = distribute_tensor(whole, weight.device_mesh, weight.placements)
            weight.to_local().copy_(shard.to_local())
        else:
            weight.copy_(whole)


def export_hf(policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a plain Hugging Face folder that any other program loads."""
    weights = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in iter_full_weights(policy)
    }
    if policy.world.is_main:
        lm = policy.lm
        config = lm.config
        implementation = config._attn_implementation
        try:
            config._attn_implementation = "sdpa"
            lm.save_pretrained(folder, state_dict=weights, safe_serialization=True)
        finally:
            config._attn_implementation = implementation
        tokenizer.save_pretrained(folder)
    policy.world.barrier()
