"""Columns of a batch: made, chosen, compared, joined. Every refusal names its key."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.errors import DataError


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Make an object array `[B]` whose entries are the values, also where those are sequences."""
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    array = np.empty(len(listed), dtype=object)
    for place, value in enumerate(listed):
        array[place] = value
    return array


def tensor_columns(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """The tensors by name; none where there is no batch."""
    return {} if batch is None else {key: batch.get(key) for key in cast("Any", batch.keys())}


def take_columns(columns: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    """The columns of these names, all of them for None.

    Raises:
        DataError: for a name that is not there.
    """
    if keys is None:
        return dict(columns)
    missing = [key for key in keys if key not in columns]
    if missing:
        raise DataError(f"no {missing[0]!r} in the batch", expected=f"one of {', '.join(columns)}")
    return {key: columns[key] for key in keys}


def check_rows(key: str, shape: Sequence[int], num_rows: int) -> None:
    """Refuse a column of another length.

    Raises:
        DataError: naming the column and its shape.
    """
    if not shape or shape[0] != num_rows:
        raise DataError(f"{key!r} has shape {tuple(shape)}", key=key, expected=f"{num_rows} rows")


def refuse_conflicts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse columns of one name and different content.

    Raises:
        DataError: naming the key and the first row that differs.
    """
    for key in mine.keys() & theirs.keys():
        left, right = mine[key], theirs[key]
        if isinstance(left, torch.Tensor) and left.shape != right.shape:
            shapes = f"{tuple(left.shape)} here and {tuple(right.shape)} there"
            raise DataError(f"{key!r} has shape {shapes}", key=key)
        if isinstance(left, torch.Tensor) and is_same(left, right):
            continue
        for row, (one, other) in enumerate(zip(left, right, strict=True)):
            if not is_same(one, other):
                raise DataError(f"{key!r} differs between the two batches", key=key, row=row)


def is_same(left: Any, right: Any) -> bool:
    """Whether two values are equal; NaN is equal to NaN."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        same = left == right
        return bool(
            (same | (left.isnan() & right.isnan()) if left.is_floating_point() else same).all()
        )
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _are_same_arrays(np.asarray(left), np.asarray(right))
    both_nan = (
        isinstance(left, float) and isinstance(right, float) and left != left and right != right
    )
    return left is right or both_nan or bool(left == right)


def _are_same_arrays(left: np.ndarray, right: np.ndarray) -> bool:
    """Compare arrays, those that hold arrays too."""
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(is_same(one, other) for one, other in zip(left.flat, right.flat, strict=True))
    has_nan = left.dtype.kind in "fc" and right.dtype.kind in "fc"
    return np.array_equal(left, right, equal_nan=has_nan)


def refuse_other_columns(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to join batches of different columns, or of columns of different width.

    Raises:
        DataError: naming the column.
    """
    differing = mine.keys() ^ theirs.keys()
    if differing:
        raise DataError(f"only one of the batches has {min(differing)!r}", key=min(differing))
    for key in mine:
        if mine[key].shape[1:] != theirs[key].shape[1:]:
            raise DataError(
                f"{key!r} is {tuple(mine[key].shape)} here and {tuple(theirs[key].shape)} there",
                key=key,
                expected="equal widths: collate to given widths",
            )


def union_facts(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join facts about batches.

    Raises:
        DataError: for a fact of which two say different things.
    """
    union: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in union and not is_same(union[key], value):
                raise DataError(f"meta_info {key!r} is {union[key]!r} and {value!r}", key=key)
            union[key] = value
    return union
