"""Join the rows of each trajectory to one row, and split results back to the rows.

A trajectory has several rows if its history was replaced or a sub-agent worked for it. Estimators,
the KL in the reward and the correction get one row for each trajectory: the response tokens of its
rows, one after the other, in the order of the rows. So the number of rows has no effect on them.

Shapes: B rows, N trajectories, T response positions of a row, W of a joined row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.protocol import DataProto
from agentrl.protocol.columns import tensor_columns

TRAJECTORY_IDS = "trajectory_ids"
"""`[B]` int64: the same for the rows of one trajectory."""
_FILLS = {"turn_ids": -1, "state_ids": -1, "policy_versions": -1}
"""What is on padding, if it is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """A batch with one row for each trajectory."""

    data: DataProto
    """N rows. Columns `[B, T]` are joined; of the others, a trajectory has its last row's."""
    trajectories: Tensor
    """`[B]` int64: the trajectory of each row."""
    kept: Tensor
    """`[B, T]` bool: the tokens that the joined rows have, up to the last trained one of a row."""
    positions: Tensor
    """`[B, T]` int64: index of a kept token in its joined row."""

    def split(self, joined: Tensor) -> Tensor:
        """Give `[N, W]` back to the rows, `[B, T]`; 0 on tokens that the joined rows lack."""
        found = joined.new_zeros(self.kept.shape)
        rows = self.trajectories[:, None].expand_as(self.positions)
        found[self.kept] = joined[rows[self.kept], self.positions[self.kept]]
        return found

    def copy_back(self, data: DataProto, names: Iterable[str]) -> None:
        """Put the columns with these names, `[N, W]` if they exist, into the batch of the rows."""
        computed = tensor_columns(self.data.batch)
        for name in names:
            if data.batch is not None and name in computed:
                data.batch[name] = self.split(computed[name])


def join_trajectories(data: DataProto) -> JoinedRows | None:
    """Join the rows of each trajectory; None if each trajectory has one row.

    Ids of turns are made unique in the trajectory.

    Example:
        Rows of two trajectories, `a a b`, with the trained tokens `[1, 2]`, `[3]` and `[4, 5]`
        become the rows `[1, 2, 3]` and `[4, 5]`.
    """
    columns = tensor_columns(data.batch)
    ids = columns.pop(TRAJECTORY_IDS, None)
    trajectories = None if ids is None else number_trajectories(ids)
    if trajectories is None:
        return None
    kept, positions = _place(columns["response_mask"].bool(), trajectories)
    count = int(trajectories.max()) + 1
    rows_of = {trajectory: row for row, trajectory in enumerate(trajectories.tolist())}
    last = torch.tensor([rows_of[trajectory] for trajectory in range(count)])
    if "turn_ids" in columns:
        columns["turn_ids"] = _number_turns(columns["turn_ids"], trajectories)
    width = int(positions[kept].max()) + 1 if kept.any() else 1
    rows = trajectories[:, None].expand_as(positions)[kept]
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        if column.shape == kept.shape:
            joined = column.new_full((count, width), _FILLS.get(name, 0))
            joined[rows, positions[kept]] = column[kept]
            tensors[name] = joined
        else:
            tensors[name] = column[last]
    objects = {name: column[last.numpy()] for name, column in data.non_tensor_batch.items()}
    whole = DataProto.from_dict(tensors, objects, data.meta_info)
    return JoinedRows(data=whole, trajectories=trajectories, kept=kept, positions=positions)


def number_trajectories(ids: Tensor) -> Tensor | None:
    """Number trajectories in the order of their first rows, `[B]`; None if all ids differ."""
    listed = ids.tolist()
    number = {name: index for index, name in enumerate(dict.fromkeys(listed))}
    if len(number) == len(listed):
        return None
    return torch.tensor([number[name] for name in listed], dtype=torch.int64)


def _place(mask: Tensor, trajectories: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are kept, `[B, T]`, and their indices in the joined rows."""
    columns = torch.arange(mask.shape[1])
    lengths = torch.where(mask, columns + 1, 0).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    used: dict[int, int] = {}
    starts: list[int] = []
    for trajectory, length in zip(trajectories.tolist(), lengths.tolist(), strict=True):
        starts.append(used.get(trajectory, 0))
        used[trajectory] = starts[-1] + length
    return columns < lengths[:, None], torch.tensor(starts)[:, None] + columns


def _number_turns(turn_ids: Tensor, trajectories: Tensor) -> Tensor:
    """Shift the ids of each row's turns after those of the trajectory's earlier rows."""
    counts = turn_ids.amax(dim=1).clamp(min=-1) + 1
    used: dict[int, int] = {}
    shifts: list[int] = []
    for trajectory, count in zip(trajectories.tolist(), counts.tolist(), strict=True):
        shifts.append(used.get(trajectory, 0))
        used[trajectory] = shifts[-1] + count
    return torch.where(turn_ids >= 0, turn_ids + torch.tensor(shifts)[:, None], turn_ids)
