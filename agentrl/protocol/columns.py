"""Functions on the columns of a batch: make, select, compare, merge, split, convert."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from agentrl.errors import DataError

if TYPE_CHECKING:
    from agentrl.protocol.batch import DataProto


_TENSOR = "a tensor [rows, ...]"


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Make an object array `[B]` of the values, even if the values are sequences."""
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    array = np.empty(len(listed), dtype=object)
    for row, value in enumerate(listed):
        array[row] = value
    return array


def read_column(key: Any, values: Any) -> np.ndarray:
    """Make an object array of a column of objects.

    Raises:
        DataError: If the values are not one for each row.
    """
    has_rows = not isinstance(values, str | bytes | Mapping | AbstractSet)
    try:
        if isinstance(key, str) and has_rows:
            return object_array(values)
    except TypeError:
        pass
    raise _no_column(key, values, "an array or a list, with a value for each row")


def read_tensors(tensors: Mapping[str, Any]) -> TensorDict | None:
    """Make the tensors of a batch; None if there are none.

    Raises:
        DataError: If a column is no tensor with rows, or has another number of rows.
    """
    num_rows = None
    for key, tensor in tensors.items():
        if not (isinstance(key, str) and isinstance(tensor, torch.Tensor)):
            raise _no_column(key, tensor, _TENSOR)
        if not tensor.ndim:
            raise DataError(f"{key!r} has shape ()", key=key, expected=_TENSOR)
        num_rows = len(tensor) if num_rows is None else num_rows
        check_rows(key, tuple(tensor.shape), num_rows)
    return None if num_rows is None else TensorDict(dict(tensors), batch_size=[num_rows])


def _no_column(key: Any, values: Any, expected: str) -> DataError:
    if not isinstance(key, str):
        return DataError(f"the name of a column is {key!r:.80}", expected="a text")
    what = f"{type(values).__name__} {values!r:.80}"
    return DataError(f"the column {key!r} is {what}", key=key, expected=expected)


def tensor_columns(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """Return the tensors by name; none if there is no batch."""
    return {} if batch is None else {key: batch.get(key) for key in cast("Any", batch.keys())}


def take_columns(columns: Mapping[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    """Return the columns with these names; None: all of them.

    Raises:
        DataError: If a name does not exist.
    """
    if keys is None:
        return dict(columns)
    missing = [key for key in keys if key not in columns]
    if missing:
        raise DataError(f"no {missing[0]!r} in the batch", expected=f"one of {', '.join(columns)}")
    return {key: columns[key] for key in keys}


def check_rows(key: str, shape: Sequence[int], num_rows: int) -> None:
    """Check the length of a column.

    Raises:
        DataError: If it differs, with the column and its shape.
    """
    if not shape or shape[0] != num_rows:
        raise DataError(f"{key!r} has shape {tuple(shape)}", key=key, expected=f"{num_rows} rows")


def refuse_conflicts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that columns with the same name are equal.

    Raises:
        DataError: If they differ, with the key and the first row that differs.
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
    """Compare arrays, including arrays of arrays."""
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(is_same(one, other) for one, other in zip(left.flat, right.flat, strict=True))
    has_nan = left.dtype.kind in "fc" and right.dtype.kind in "fc"
    return np.array_equal(left, right, equal_nan=has_nan)


def refuse_other_columns(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that two batches have the same columns with the same widths.

    Raises:
        DataError: If they do not, with the column.
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
    """Merge facts about batches.

    Raises:
        DataError: If two batches have different values for a fact.
    """
    union: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in union and not is_same(union[key], value):
                raise DataError(f"meta_info {key!r} is {union[key]!r} and {value!r}", key=key)
            union[key] = value
    return union


METRICS = "metrics"
"""The fact in `meta_info` that differs between workers. `concat` collects it."""


def unfold_chunks(
    columns: Mapping[str, Any], num_chunks: int, split_keys: Sequence[str]
) -> dict[str, Any]:
    """Split columns `[B, C, ...]` along C into rows, and repeat the rows of the other columns.

    Args:
        columns: Tensors and arrays.
        num_chunks: Number of chunks of each row.
        split_keys: Names of the columns to split.

    Raises:
        DataError: If the width of a column is not a multiple of `num_chunks`.
    """
    unfolded: dict[str, Any] = {}
    for key, column in columns.items():
        if key not in split_keys:
            is_tensor = isinstance(column, torch.Tensor)
            repeat: Any = torch.repeat_interleave if is_tensor else np.repeat
            unfolded[key] = repeat(column, num_chunks, 0)
            continue
        if column.ndim == 1:  # objects: each row is a list
            unfolded[key] = object_array([c for row in column for c in _cut(row, num_chunks)])
            continue
        rows, width, *rest = column.shape
        if width % num_chunks:
            raise DataError(f"{key!r} is {width} wide", expected=f"a multiple of {num_chunks}")
        unfolded[key] = column.reshape(rows * num_chunks, width // num_chunks, *rest)
    return unfolded


def _cut(row: Sequence[Any], num_chunks: int) -> list[Sequence[Any]]:
    width = len(row) // num_chunks
    return [row[at * width : (at + 1) * width] for at in range(num_chunks)]


def as_tensordict(data: "DataProto") -> TensorDict:
    """Convert a batch to one TensorDict with tensors, objects and facts."""
    columns: dict[str, Any] = dict(tensor_columns(data.batch))
    for key, array in data.non_tensor_batch.items():
        columns[key] = NonTensorStack(*(NonTensorData(value) for value in array))
    whole = TensorDict(columns, batch_size=[len(data)])
    for key, value in data.meta_info.items():
        whole.set_non_tensor(key, value)
    return whole


def read_tensordict(
    whole: TensorDict,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors, objects of rows and facts of a TensorDict."""
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for key in cast("Any", whole.keys()):
        value: Any = cast("Any", whole)._get_str(key, None)
        if isinstance(value, NonTensorStack):
            objects[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    return tensors, objects, facts


def collect_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Collect the metrics of several workers: a list for each name.

    Args:
        infos: Facts of batches. `metrics` is a dict, a list of dicts, or missing.

    Raises:
        DataError: If a worker does not have all the metrics.
    """
    each: list[Mapping[str, Any]] = []
    for found in (info.get(METRICS) for info in infos):
        each += cast("list[Any]", found) if isinstance(found, list) else [found] if found else []
    names = list(each[0]) if each else []
    for metrics in each:
        if differing := metrics.keys() ^ set(names):
            raise DataError(f"only some workers have the metric {min(differing)!r}", key=METRICS)
    return {name: [metrics[name] for metrics in each] for name in names}


def describe_batch(data: "DataProto") -> str:
    """List the columns and facts of a batch with their shapes or types."""
    tensors = tensor_columns(data.batch).items()
    return "\n".join(
        [
            "batch",
            *(f"  {key}: {tuple(t.shape)} ({t.dtype}) {t.device}" for key, t in tensors),
            "non_tensor_batch",
            *(f"  {key}: ndarray{a.shape} ({a.dtype})" for key, a in data.non_tensor_batch.items()),
            "meta_info",
            *(f"  {key}: {type(value).__name__}" for key, value in data.meta_info.items()),
        ]
    )
