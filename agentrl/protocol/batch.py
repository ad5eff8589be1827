"""`DataProto`, the batch that stages with tensors pass to each other.

A `DataProto` has B rows: tensors `[B, ...]`, object arrays `[B]`, and facts about the whole batch.
`agentrl.collate` lists the keys. Selecting and repeating return new objects, which may share memory
with the old one. `union`, `pop`, `rename`, `reorder` and `to` change the batch itself, as in verl.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from agentrl.errors import DataError
from agentrl.protocol.columns import (
    METRICS,
    as_tensordict,
    check_rows,
    collect_metrics,
    describe_batch,
    read_column,
    read_tensordict,
    read_tensors,
    refuse_conflicts,
    refuse_other_columns,
    take_columns,
    tensor_columns,
    unfold_chunks,
    union_facts,
)
from agentrl.protocol.pickling import Packed, pack_tensors, unpack_tensors
from agentrl.protocol.saving import read_columns, write_columns

Rows = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
"""A selection of rows: their indices, or a boolean for each row."""

AUTO_PADDING = "_verl_auto_padding"
"""Key of `meta_info`: worker groups may pad the batch; the name is verl's."""


@dataclass
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: TensorDict | None
    """Tensors of the row, without the batch dimension."""
    non_tensor_batch: dict[str, Any]
    """Objects of the row."""
    meta_info: dict[str, Any]
    """Facts about the batch of the row."""


@dataclass
class DataProto:
    """B rows of tensors and objects.

    Example:
        >>> data = DataProto.from_dict({"x": torch.arange(3)}, {"uid": ["a", "a", "b"]})
        >>> len(data), data[1:].non_tensor_batch["uid"].tolist()
        (3, ['a', 'b'])
    """

    batch: TensorDict | None = None
    """Tensors by name, each `[B, ...]`."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Object arrays by name, each `[B]`."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Facts about the whole batch; JSON values, if the batch is saved."""

    def __post_init__(self) -> None:
        given = {"batch": self.batch, "non_tensor_batch": self.non_tensor_batch}
        for name, columns in given.items():
            _check_mapping(columns, name)
        if not isinstance(self.batch, TensorDictBase):
            self.batch = read_tensors(self.batch or {})
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        for key, values in self.non_tensor_batch.items():
            if not (isinstance(key, str) and isinstance(values, np.ndarray) and values.ndim):
                self.non_tensor_batch[key] = read_column(key, values)
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Make a batch from columns.

        Args:
            tensors: Tensors by name, each `[B, ...]`.
            non_tensors: Objects by name, B each.
            meta_info: Facts about the whole batch.
            auto_padding: Worker groups may pad the batch to a multiple of their ranks.

        Raises:
            DataError: If a column has no rows, or another number of rows than the others.
        """
        _check_mapping(tensors, "tensors")
        _check_mapping(non_tensors, "non_tensors")
        columns = {key: read_column(key, values) for key, values in (non_tensors or {}).items()}
        batch = read_tensors(tensors or {})
        facts = dict(meta_info or {})
        if auto_padding:
            facts[AUTO_PADDING] = True
        return cls(batch, columns, facts)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray | Sequence[Any]],
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Make a batch from tensors and objects in one mapping.

        Raises:
            DataError: As `from_dict`.
        """
        _check_mapping(data, "data")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in data.items() if key not in tensors}
        columns = cast("Mapping[str, Sequence[Any]]", others)
        return cls.from_dict(tensors, columns, meta_info, auto_padding=auto_padding)

    def check_consistency(self) -> None:
        """Check that every column has the same number of rows.

        Raises:
            DataError: With the column, its shape, and what was expected.
        """
        if self.batch is not None and len(self.batch.batch_size) != 1:
            shape = tuple(self.batch.batch_size)
            raise DataError(f"a batch of shape {shape}", expected="one batch dimension")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise DataError(f"{key!r} is a {type(array).__name__}", expected="a numpy array")
            check_rows(key, array.shape, len(self))

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (pack_tensors(self.batch), self.non_tensor_batch, self.meta_info)

    @overload
    def __getitem__(self, rows: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, rows: slice | Rows) -> "DataProto": ...
    def __getitem__(self, rows: int | slice | Rows) -> "DataProto | DataProtoItem":
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(rows, int | np.integer):
            return self._item(int(rows))
        return self.select_idxs(cast("Rows", rows))

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        batch = None if self.batch is None else cast("TensorDict", self.batch[row])
        return DataProtoItem(
            batch,
            {key: array[row] for key, array in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    # Selecting

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Return the rows `start`, `start + step`, ... before `end`."""
        rows = slice(start, end, step)
        if step is not None and step < 0:  # tensors do not support negative steps
            return self.select_idxs(np.arange(len(self))[rows])
        batch = None if self.batch is None else cast("TensorDict", self.batch[rows])
        columns = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return DataProto(batch, columns, dict(self.meta_info))

    def select_idxs(self, idxs: Rows) -> "DataProto":
        """Return the rows with these indices, in their order, or those with a true value."""
        if isinstance(idxs, torch.Tensor):
            idxs = idxs.detach().cpu().numpy()
        rows = np.asarray(idxs)
        if rows.dtype == np.bool_:
            check_rows("idxs", rows.shape, len(self))
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.int64)
        if rows.size and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(self)}")
        batch = None
        if self.batch is not None:
            batch = cast("TensorDict", self.batch[torch.from_numpy(rows)])
        columns = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return DataProto(batch, columns, dict(self.meta_info))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Return the columns with these names; None keeps all of a kind."""
        chosen = DataProto(
            self._take_tensors(batch_keys),
            take_columns(self.non_tensor_batch, non_tensor_batch_keys),
            take_columns(self.meta_info, meta_info_keys),
        )
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove and return the columns with these names; None removes none of a kind."""
        taken = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        for key in batch_keys or ():
            cast("TensorDict", self.batch).del_(key)
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return taken

    def _take_tensors(self, keys: Sequence[str] | None) -> TensorDict | None:
        if self.batch is None:
            take_columns({}, keys)
            return None
        return TensorDict(
            take_columns(tensor_columns(self.batch), keys), batch_size=self.batch.batch_size
        )

    # Changing in place

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns of `other`; a column that both have must be the same.

        Raises:
            DataError: With the key and the first row in which the two differ. Nothing is changed
                then.
        """
        if self._columns() and other._columns() and len(self) != len(other):
            raise DataError(f"{len(other)} rows to add to {len(self)}")
        mine, theirs = tensor_columns(self.batch), tensor_columns(other.batch)
        refuse_conflicts(mine, theirs)
        refuse_conflicts(self.non_tensor_batch, other.non_tensor_batch)
        meta_info = union_facts([self.meta_info, other.meta_info])
        if other.batch is not None:
            self.batch = TensorDict(theirs | mine, batch_size=other.batch.batch_size)
        self.non_tensor_batch = other.non_tensor_batch | self.non_tensor_batch
        self.meta_info = meta_info
        return self

    def _columns(self) -> dict[str, Any]:
        return {**tensor_columns(self.batch), **self.non_tensor_batch}

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Rename tensors."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise DataError(f"{len(old)} names to replace by {len(new)}")
        tensors = tensor_columns(self.batch)
        take_columns(tensors, old)
        names = dict(zip(old, new, strict=True))
        renamed = {names.get(key, key): tensor for key, tensor in tensors.items()}
        if len(renamed) != len(tensors):
            raise DataError(f"renaming {old} to {new} would make two columns one")
        self.batch = TensorDict(renamed, batch_size=[len(self)]) if tensors else self.batch
        return self

    def reorder(self, indices: Rows) -> None:
        """Change the order of the rows."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def to(self, device: str | torch.device) -> "DataProto":
        """Move the tensors to a device."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # Repeating, splitting and concatenating

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat the rows one by one (a a b b), or the whole batch (a b a b)."""
        rows = np.arange(len(self))
        return self.select_idxs(
            np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        )

    def split(self, split_size: int) -> "list[DataProto]":
        """Split into parts of `split_size` rows; the last one may be shorter."""
        if split_size < 1:
            raise DataError(f"parts of {split_size} rows", expected="at least 1")
        return [self.slice(at, at + split_size) for at in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Split into `chunks` parts of equal length.

        Raises:
            DataError: If the number of rows is not a multiple.
        """
        if chunks < 1 or len(self) % chunks:
            raise DataError(
                f"{len(self)} rows cannot be split into {chunks} equal parts",
                expected="call pad_dataproto_to_divisor first, or split",
            )
        size = len(self) // chunks
        return [self.slice(at * size, (at + 1) * size) for at in range(chunks)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Concatenate batches that have the same columns.

        The facts in `meta_info` must be equal, except `metrics`: each worker has its own, and each
        metric becomes the list of the values of all workers.

        Raises:
            DataError: If columns, shapes or facts in `meta_info` differ, with the key.
        """
        if not data:
            raise DataError("nothing to concatenate", expected="at least one batch")
        for other in data[1:]:
            refuse_other_columns(data[0]._columns(), other._columns())
        tensors = {
            key: torch.cat([tensor_columns(part.batch)[key] for part in data])
            for key in tensor_columns(data[0].batch)
        }
        columns = {
            key: np.concatenate([part.non_tensor_batch[key] for part in data])
            for key in data[0].non_tensor_batch
        }
        infos = [part.meta_info for part in data]
        facts = union_facts([{k: v for k, v in i.items() if k != METRICS} for i in infos])
        if metrics := collect_metrics(infos):
            facts[METRICS] = metrics
        return DataProto.from_dict(tensors, columns, facts)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row `padding_size` times, in place.

        Args:
            padding_size: Number of rows to append.
            padding_candidate: `first` appends the first row instead.
        """
        row = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder(np.append(np.arange(len(self)), [row] * padding_size))

    def sample_level_repeat(
        self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor
    ) -> "DataProto":
        """Repeat each row as often as its number in `repeat_times`.

        Raises:
            DataError: If there is not one number for each row.
        """
        times = np.asarray(repeat_times)
        check_rows("repeat_times", times.shape, len(self))
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(
        self, n_split: int, split_keys: Sequence[str] | None = None
    ) -> "DataProto":
        """Split the columns `split_keys` `[B, C, ...]` into `[B * n_split, C / n_split, ...]`.

        The rows of all other columns are repeated to match.
        """
        keys = split_keys or ()
        tensors = unfold_chunks(tensor_columns(self.batch), n_split, keys)
        arrays = unfold_chunks(self.non_tensor_batch, n_split, keys)
        batch = TensorDict(tensors, batch_size=[len(self) * n_split]) if tensors else None
        return DataProto(batch, arrays, dict(self.meta_info))

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None
    ) -> "Iterator[DataProto]":
        """Pass over the rows `epochs` times in mini-batches; the last of a pass may be shorter.

        Args:
            mini_batch_size: Rows of one piece.
            epochs: Passes.
            seed: Seed of a new order for each pass; None: the order of the rows.
        """
        for epoch in range(epochs):
            rows = np.arange(len(self))
            if seed is not None:
                np.random.default_rng((seed, epoch)).shuffle(rows)
            yield from self.select_idxs(rows).split(mini_batch_size)

    # Converting

    def to_tensordict(self) -> TensorDict:
        """Convert to a TensorDict, with objects and facts as its non-tensor data."""
        return as_tensordict(self)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """Convert from a TensorDict. Its facts are added to `meta_info`."""
        tensors, objects, facts = read_tensordict(tensor_dict)
        return cls.from_dict(tensors, objects, {**(meta_info or {}), **facts})

    def get_data_info(self) -> str:
        """List the columns and facts with their shapes or types."""
        return describe_batch(self)

    def print_size(self, prefix: str = "") -> None:
        """Print the memory of the columns."""
        tensors = tensor_columns(self.batch).values()
        tensor_gb = sum(t.element_size() * t.numel() for t in tensors) / 1024**3
        array_gb = sum(array.nbytes for array in self.non_tensor_batch.values()) / 1024**3
        size = f"size of tensors: {tensor_gb:g} GB, size of non_tensor_batch: {array_gb:g} GB"
        print(f"{prefix}, {size}" if prefix else size)

    # Saving, without pickle: loading a file runs no code

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to one safetensors file, atomically.

        Objects must be JSON values or pydantic models. Models are loaded as dicts.

        Raises:
            DataError: If JSON cannot hold an object, with its key and row.
        """
        write_columns(
            filepath, tensor_columns(self.batch), dict(self.non_tensor_batch), self.meta_info
        )

    @staticmethod
    def load_from_disk(filepath: str | Path) -> "DataProto":
        """Load a batch that `save_to_disk` wrote.

        Raises:
            DataError: If the file is damaged or of another format.
        """
        return DataProto.from_dict(*read_columns(filepath))


def _check_mapping(columns: Any, name: str) -> None:
    if not isinstance(columns, Mapping | TensorDictBase | None):
        raise DataError(f"{name} is {columns!r:.80}", key=name, expected="columns by name")


def _unpickle(
    packed: Packed | TensorDict | None, columns: dict[str, np.ndarray], facts: dict[str, Any]
) -> DataProto:
    return DataProto(unpack_tensors(packed), columns, facts)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows up to a multiple. Return the batch and the number added."""
    num_padded = -len(data) % size_divisor
    if not num_padded:
        return data, 0
    if not len(data):
        raise DataError("no row to pad with", expected="at least one row")
    rows = np.arange(len(data) + num_padded) % len(data)
    return data.select_idxs(rows), num_padded


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the padded rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data
