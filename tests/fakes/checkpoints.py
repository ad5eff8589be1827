"""Checkpoints without an actor, and the whole tensors of a checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.remote_io import Location, RemotePath
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.checkpoint_writer import CheckpointWriter, copy_to_host
from agentrl.workers.shards import LocalSlice

P = TypeVar("P", Path, RemotePath)


def whole(tensor: Tensor) -> LocalSlice:
    """A slice that is the whole tensor."""
    return LocalSlice(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def write_checkpoint(
    root: P,
    state: RunState,
    tensors: Mapping[str, Tensor],
    *,
    keep: int | None = None,
    best: int | None = None,
) -> P:
    """Write a checkpoint of whole tensors, as one rank does, in this thread."""
    writer = CheckpointWriter(root, state, keep=keep, best=best, patience_s=0.0)
    host = copy_to_host({name: whole(tensor) for name, tensor in tensors.items()}, 0)
    draft = writer.begin()
    try:
        writer.write_rank(draft, 0, host)
    except CheckpointError:
        with suppress(CheckpointError):
            writer.publish(draft)
        raise
    return cast("P", writer.publish(draft))


def read_tensors(path: Location) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, named `weight/NAME` or `moment/NAME`."""
    checkpoint = open_checkpoint(path)
    tensors: dict[str, Tensor] = {}
    for name, slices in checkpoint.manifest.tensors.items():
        ends = [[o + n for o, n in zip(s.offset, s.shape, strict=True)] for s in slices]
        tensors[name] = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan)
    checkpoint.read({name: whole(tensor) for name, tensor in tensors.items()})
    return tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint by Hugging Face name."""
    names = read_tensors(path)
    return {
        name.removeprefix("weight/"): tensor
        for name, tensor in names.items()
        if name.startswith("weight/")
    }
