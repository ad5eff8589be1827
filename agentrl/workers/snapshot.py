"""Save an actor to a checkpoint or a Hugging Face folder, and restore it. Collectives."""

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
"""Name of the file with the run and the step of an exported model."""

_MODEL_FILES = [
    "*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*",
]  # fmt: skip
"""Files of a model: an export replaces all of them."""


def identify(policy: PolicyModel) -> ModelIdentity:
    """Return the identity of a policy's model."""
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
    """Write a checkpoint of the run on the main rank; all ranks wait until it is complete.

    Args:
        root: The folder of the run's checkpoints.
        actor: Weights and moments.
        state: The trainer's state; the actor's counters and the random state are added.
        keep: Number of checkpoints to keep.
        best: A step; its checkpoint is kept in addition.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
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
    """Restore an actor and this rank's random state from a checkpoint.

    Raises:
        CheckpointError: if it is incomplete, damaged, of another model or another optimizer; then
            nothing is changed.
        RankError: if another rank could not read it.
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
    """Copy whole weights into the policy's own memory; each rank copies its shard."""
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
    """Write a Hugging Face folder that other programs can load, atomically.

    All files of a model in the folder are replaced; its other files stay.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
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
            _link_other_files(folder, aside)
            if about is not None:
                text = json.dumps(about, indent=2) + "\n"
                (aside / ABOUT).unlink(missing_ok=True)  # it may be a link to an earlier one
                (aside / ABOUT).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the model: {error}", path=folder) from error
    return folder


@contextmanager
def _plain_attention(config: PretrainedConfig) -> Iterator[None]:
    """Hide the name of agentrl's attention, which other programs do not have."""
    implementation = config._attn_implementation
    try:
        config._attn_implementation = "sdpa"
        yield
    finally:
        config._attn_implementation = implementation


def _link_other_files(old: Path, new: Path) -> None:
    """Link the other files of a folder into the folder that replaces it."""

    def model_files(folder: str, names: list[str]) -> list[str]:
        patterns = _MODEL_FILES if Path(folder) == old else []
        return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    if old.is_dir():
        shutil.copytree(
            old, new, ignore=model_files, copy_function=_link, symlinks=True, dirs_exist_ok=True
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def on_main(world: World, act: Callable[[], T]) -> T:
    """Call a function on the main rank; return its result, or raise its error, on every rank."""
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
