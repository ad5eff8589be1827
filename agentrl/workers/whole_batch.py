"""A batch whose rows lie on several ranks, as one: for what compares rows with each other.

Pure functions of a batch (advantages, baselines, whitening) know nothing of ranks. Every rank is
given the columns that they read, of all rows and in the order of one rank, computes the same, and
keeps what is its own: a group's members may lie on different ranks, and no estimator must care.

What travels is the columns named, 4 to 8 bytes for each response position; the longest response of
the batch gives the width. Rewards and mask of 2048 rows of 4096 positions are 100 MB on each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.protocol import DataProto
from agentrl.workers.distributed import World

ORDER = "batch_data_id"
"""The column by which rows are put in the order of one rank."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The rows of all ranks."""

    data: DataProto
    """In the order of the batch on one rank."""
    own: Tensor
    """`[b]` int64: where each of this rank's rows stands in it."""


def gather_batch(
    batch: DataProto, tensors: Sequence[str], objects: Sequence[str], world: World
) -> WholeBatch:
    """Bring columns of all ranks' rows together. A collective.

    Rows are ordered by their prompt's place in the batch, and within a group by the rank: that is
    how `deal_samples` deals them.

    Args:
        batch: This rank's rows, collated to widths that the ranks share.
        tensors: Names of tensors; every rank names the same.
        objects: Names of object columns; a row of a rank that has no such column has None there.
        world: The ranks.
    """
    columns = {} if batch.batch is None else dict(batch.batch.items())
    names = [*tensors, *([ORDER] if ORDER in columns and ORDER not in tensors else [])]
    gathered = {name: world.gather_rows(columns[name]) for name in names}
    beside = _gather_objects(batch, objects, world)
    data = DataProto.from_dict(gathered, beside)
    places = gathered.get(ORDER, torch.zeros(len(data), dtype=torch.int64))
    order = torch.argsort(places, stable=True)
    counts = world.gather(len(batch))
    first = sum(counts[: world.rank])
    own = torch.argsort(order)[first : first + len(batch)]
    return WholeBatch(data.select_idxs(order), own)


def _gather_objects(batch: DataProto, names: Sequence[str], world: World) -> dict[str, list[Any]]:
    empty = np.full(len(batch), None, dtype=object)
    mine = {name: batch.non_tensor_batch.get(name, empty).tolist() for name in names}
    parts = world.gather((len(batch), mine))
    found = dict.fromkeys(name for _, part in parts for name in part)
    return {
        name: [value for count, part in parts for value in part.get(name, [None] * count)]
        for name in found
    }
