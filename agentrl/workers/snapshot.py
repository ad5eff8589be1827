"""An actor -> what a checkpoint holds of it, and back. Every function is a collective."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from agentrl.atomic_io import atomic_folder, naming_path
from agentrl.errors import CheckpointError
from agentrl.workers.actor import Actor, ActorCounters
from agentrl.workers.checkpoint import (
    ModelIdentity,
    RunState,
    Snapshot,
    load_checkpoint,
    save_checkpoint,
)
from agentrl.workers.distributed import World
from agentrl.workers.model import PolicyModel
from agentrl.workers.rng import capture_random_state, restore_random_state
from agentrl.workers.weight_sync import iter_full_weights

T = TypeVar("T")

ABOUT = "agentrl.json"
"""Name of the file that says from which step of a run an exported model is."""

_MODEL_FILES = [
    "*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*",
]  # fmt: skip
"""What a loader reads of a model's folder: none of it may be another model's."""


def identify(policy: PolicyModel) -> ModelIdentity:
    """Say which model this is."""
    shapes = {name: list(weight.shape) for name, weight in policy.named_weights()}
    return ModelIdentity(type(policy.lm).__name__, shapes)


def save_run(
    root: Path,
    actor: Actor,
    state: RunState,
    *,
    keep: int | None = None,
    best: int | None = None,
) -> Path:
    """Write a checkpoint of the run; the main rank writes, all wait until it stands.

    Args:
        root: The folder of the run's checkpoints.
        actor: Weights and moments.
        state: The trainer's part; the actor's counters and the random streams are added.
        keep: Complete checkpoints to keep.
        best: A step whose checkpoint is kept besides those.

    Raises:
        CheckpointError: on every rank, where it cannot be written.
    """
    world = actor.world
    streams = world.gather(capture_random_state())
    state = replace(
        state, actor=asdict(actor.counters()), random=streams, identity=identify(actor.policy)
    )
    snapshot = Snapshot(
        state=state,
        model=dict(iter_full_weights(actor.policy)),
        optimizer=actor.optimizer.state_tensors(),
    )
    return on_main(actor.world, lambda: save_checkpoint(root, snapshot, keep=keep, best=best))


def load_run(path: Path, actor: Actor) -> RunState:
    """Put an actor and this rank's random streams to where a checkpoint was written.

    Raises:
        CheckpointError: where it is incomplete, damaged, of another model or another optimizer;
            nothing has changed then.
        RankError: where another rank could not read it.
    """
    with actor.world.raise_on_all_ranks():
        snapshot = load_checkpoint(path, identify(actor.policy))
    counters = ActorCounters(**snapshot.state.actor)
    actor.optimizer.load_state_tensors(snapshot.optimizer, counters.num_optimizer_steps)
    actor.num_updates = counters.num_updates
    load_weights(actor.policy, snapshot.model)
    streams = snapshot.state.random
    if actor.world.rank < len(streams):
        restore_random_state(streams[actor.world.rank])
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


def export_hf(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a plain Hugging Face folder that any other program loads, whole or not at all.

    A model that is there already gives way as a whole; what else lies in the folder stays.

    Raises:
        CheckpointError: on every rank, where it cannot be written.
    """
    weights = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in iter_full_weights(policy)
    }
    on_main(policy.world, lambda: _write_model(policy, weights, tokenizer, folder.resolve(), about))


def _write_model(
    policy: PolicyModel,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    about: Mapping[str, Any] | None,
) -> Path:
    try:
        with naming_path(folder), atomic_folder(folder) as aside:
            with _plain_attention(policy.config):
                policy.lm.save_pretrained(aside, state_dict=weights, safe_serialization=True)
            tokenizer.save_pretrained(aside)
            _take_along(folder, aside)
            if about is not None:
                text = json.dumps(about, indent=2) + "\n"
                (aside / ABOUT).unlink(missing_ok=True)  # it may be a link to an earlier one
                (aside / ABOUT).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the model: {error}", path=folder) from error
    return folder


@contextmanager
def _plain_attention(config: PretrainedConfig) -> Iterator[None]:
    """Let no other program read the name of our own attention."""
    implementation = config._attn_implementation
    try:
        config._attn_implementation = "sdpa"
        yield
    finally:
        config._attn_implementation = implementation


def _take_along(old: Path, new: Path) -> None:
    """Link what lies beside an earlier model into the folder that replaces it."""

    def of_a_model(folder: str, names: list[str]) -> list[str]:
        patterns = _MODEL_FILES if Path(folder) == old else []
        return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    if old.is_dir():
        shutil.copytree(
            old, new, ignore=of_a_model, copy_function=_link, symlinks=True, dirs_exist_ok=True
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def on_main(world: World, act: Callable[[], T]) -> T:
    """Do on the main rank what one rank should do; every rank gets, or raises, what came of it."""
    result: T | None = None
    failure: Exception | None = None
    if world.is_main:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            failure = error
    result, failure = world.broadcast((result, failure))
    if failure is not None:
        world.status.shared_error = failure
        raise failure
    return cast("T", result)
