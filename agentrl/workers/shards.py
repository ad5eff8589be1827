"""The slice of a tensor that a rank holds, and how slices of different layouts overlap."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.workers.distributed import World


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """This rank's slice of a tensor."""

    local: Tensor
    """The rank's own memory."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the slice's first element, per dimension."""
    copy: int = 0
    """Several ranks may hold the same slice; this is the index of the rank among them."""
    num_copies: int = 1


class Overlap(NamedTuple):
    """The elements that two slices of one tensor share."""

    in_first: tuple[slice, ...]
    in_second: tuple[slice, ...]
    num_elements: int


def local_slice(tensor: Tensor, world: World, *, like: Tensor | None = None) -> LocalSlice:
    """Locate the part of a tensor that this rank holds.

    Args:
        tensor: A sharded tensor; or a plain one, which every rank holds as a whole.
        world: The ranks.
        like: A sharded tensor of the same layout, if `tensor` is its plain local part.
    """
    layout = tensor if isinstance(tensor, DTensor) or tensor.ndim == 0 else like
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if not isinstance(layout, DTensor):
        origin = (0,) * tensor.ndim
        return LocalSlice(local, tuple(tensor.shape), origin, world.rank, world.size)
    mesh, placements = layout.device_mesh, layout.placements
    _, offset = compute_local_shape_and_global_offset(layout.shape, mesh, placements)
    copy, num_copies = 0, 1
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            copy = copy * mesh.size(dim) + mesh.get_local_rank(dim)
            num_copies *= mesh.size(dim)
    return LocalSlice(local, tuple(layout.shape), tuple(offset), copy, num_copies)


def overlap(
    first: tuple[Iterable[int], Iterable[int]], second: tuple[Iterable[int], Iterable[int]]
) -> Overlap:
    """Intersect two slices of one tensor, each an offset and a shape.

    Example:
        >>> overlap(([2], [4]), ([3], [9])).in_first
        (slice(1, 4, None),)
    """
    in_first, in_second, num = list[slice](), list[slice](), 1
    for offset, size, other_offset, other_size in zip(*first, *second, strict=True):
        start = max(offset, other_offset)
        length = max(0, min(offset + size, other_offset + other_size) - start)
        in_first.append(slice(start - offset, start - offset + length))
        in_second.append(slice(start - other_offset, start - other_offset + length))
        num *= length
    return Overlap(tuple(in_first), tuple(in_second), num)


def byte_view(tensor: Tensor) -> Tensor:
    """View a tensor's elements as bytes, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def full_tensor(shard: Tensor) -> Tensor:
    """Gather a sharded tensor; on one rank, return the shard itself, not a copy.

    A collective: every rank must call it, in the same order.
    """
    if not isinstance(shard, DTensor):
        return shard
    if shard.device_mesh.size() == 1:
        return shard.to_local()
    return shard.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard; a tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
