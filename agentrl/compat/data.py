"""Batches, dataset and tensor functions of verl 0.6.1."""

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import Sampler

from agentrl.errors import DataError
from agentrl.media.loading import load_media
from agentrl.media.records import MediaKind
from agentrl.plugins import load_object
from agentrl.protocol import (
    DataProto,
    DataProtoItem,
    object_array,
)


def collate_items(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch of rows."""
    batches = [item.batch for item in x]
    batch = None if batches[0] is None else cast("TensorDict", torch.stack(cast("Any", batches)))
    names = x[0].non_tensor_batch
    arrays = {name: object_array([item.non_tensor_batch[name] for item in x]) for name in names}
    return DataProto(None if batch is None else batch.contiguous(), arrays)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the second's tensors to the first, in place; equal names must hold equal tensors."""
    merged = DataProto(tensor_dict1).union(DataProto(tensor_dict2)).batch
    tensor_dict1.update(cast("TensorDict", merged))
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the second's arrays to the first, in place; equal names must hold equal arrays."""
    mine, theirs = DataProto(None, tensor_dict1), DataProto(None, tensor_dict2)
    tensor_dict1.update(mine.union(theirs).non_tensor_batch)
    return tensor_dict1


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Fold B rows into `[new_batch_size, B / new_batch_size, ...]`.

    Raises:
        DataError: if `new_batch_size` does not divide the rows.
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


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each row that a mask keeps, from 0."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


def collate_rows(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Turn rows into columns: stack tensors, put everything else into object arrays."""
    columns = {key: [row[key] for row in data_list] for key in data_list[0]}
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for key, values in columns.items()
    }


class RLHFDataset:
    """Read data files into `self.dataframe`. `data.custom_cls` names it or a subclass.

    Subclasses override `_read_files_and_tokenize`, `maybe_filter_out_long_prompts` or
    `__getitem__`. A row is a dict of columns (`prompt`, `data_source`, `reward_model`,
    `extra_info`): agentrl renders prompts and drops long ones itself.

    Args:
        data_files: Parquet, JSON or JSONL files.
        tokenizer: None here.
        config: The section `data`, as an OmegaConf mapping.
        processor: None here.
        max_samples: Rows to keep; -1: all.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor = tokenizer, processor
        self.config = config if config is not None else {}
        self.max_samples = max_samples
        self.prompt_key = self.config.get("prompt_key", "prompt")
        self.max_prompt_length = self.config.get("max_prompt_length", 1024)
        self.dataframe: Any = None
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: the files are local."""

    def _read_files_and_tokenize(self) -> None:
        """Fill `self.dataframe` with the rows of all files."""
        import datasets

        kinds = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
        parts: list[Any] = [
            datasets.load_dataset(kinds[Path(file).suffix], data_files=file, split="train")
            for file in self.data_files
        ]
        rows: Any = datasets.concatenate_datasets(parts)
        if 0 <= self.max_samples < len(rows):
            rows = rows.select(range(self.max_samples))
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Keep every row: `data.filter_overlong_prompts` is applied after this class."""
        return dataframe

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return dict(self.dataframe[item])


class AbstractSampler(Sampler[int]):
    """Orders the training rows; `data.sampler` names a subclass."""

    def __init__(self, data_source: Sized, data_config: Any) -> None:
        """Accept the arguments of every sampler."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that gets the batch of each step."""

    def update(self, batch: DataProto) -> None:
        """Take the batch of a step."""
        raise NotImplementedError


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: Mapping[str, Any],
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """Build the dataset class of `custom_cls`, or `RLHFDataset`."""
    chosen = data_config.get("custom_cls") or {}
    path, kind = chosen.get("path"), RLHFDataset
    if path is not None:
        kind = load_object(f"{path}:{chosen['name']}")
    return kind(data_paths, tokenizer, data_config, processor, max_samples)


def process_image(image: Any, *_: Any, **__: Any) -> Any:
    """Decode an image, in any form that a row may have, as a `PIL.Image.Image` in RGB.

    It is not scaled: the model's processor does that.

    Raises:
        DataError: If it cannot be decoded.
    """
    return load_media(MediaKind.IMAGE, image).data.copy()


def process_video(video: Any, *_: Any, **__: Any) -> Any:
    """Decode a video as a `[F, 3, H, W]` float tensor, as verl returns it.

    Raises:
        DataError: If it cannot be decoded.
        MissingExtraError: For a file without the package that reads it.
    """
    frames = load_media(MediaKind.VIDEO, video).data.frames
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float()
