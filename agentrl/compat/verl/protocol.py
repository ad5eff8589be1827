"""`verl.protocol`: the batch, and functions on batches."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.errors import DataError
from agentrl.protocol import (
    DataProto,
    DataProtoItem,
    object_array,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

__all__ = [
    "DataProto",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch of rows."""
    batches = [item.batch for item in x]
    batch = None if batches[0] is None else cast("TensorDict", torch.stack(cast("Any", batches)))
    names = x[0].non_tensor_batch
    arrays = {name: object_array([item.non_tensor_batch[name] for item in x]) for name in names}
    return DataProto(None if batch is None else batch.contiguous(), arrays)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first, in place; those of one name must be the same."""
    merged = DataProto(tensor_dict1).union(DataProto(tensor_dict2)).batch
    tensor_dict1.update(cast("TensorDict", merged))
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place; those of one name must be the same."""
    mine, theirs = DataProto(None, tensor_dict1), DataProto(None, tensor_dict2)
    tensor_dict1.update(mine.union(theirs).non_tensor_batch)
    return tensor_dict1


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Fold B rows into `[new_batch_size, B / new_batch_size, ...]`.

    Raises:
        DataError: if the rows do not divide.
    """
    if len(data) % new_batch_size:
        raise DataError(f"{len(data)} rows", expected=f"a multiple of {new_batch_size}")
    batch = None if data.batch is None else data.batch.view(new_batch_size, -1)
    if batch is not None:
        batch.auto_batch_size_(batch_dims=1)
    arrays = {
        key: array.reshape(new_batch_size, -1, *array.shape[1:])
        for key, array in data.non_tensor_batch.items()
    }
    return DataProto(batch, arrays, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undo `fold_batch_dim`: the first dimensions become the rows."""
    batch = None
    if data.batch is not None:
        folded = data.batch.copy()
        folded.auto_batch_size_(batch_dims=batch_dims)
        batch = folded.view(-1)
    arrays = {
        key: array.reshape(-1, *array.shape[batch_dims:])
        for key, array in data.non_tensor_batch.items()
    }
    return DataProto(batch, arrays, dict(data.meta_info))


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace a rank's rows by those of all ranks of a group, in the order of the ranks."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(parts, data.to("cpu"), group=process_group)
    whole = DataProto.concat(parts)
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch
