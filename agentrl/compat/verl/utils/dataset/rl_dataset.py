"""`verl.utils.dataset.rl_dataset`: rows for agentrl, under the names that subclasses override."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.protocol import object_array


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Make columns of rows: tensors are stacked, everything else becomes an object array."""
    columns = {key: [row[key] for row in data_list] for key in data_list[0]}
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for key, values in columns.items()
    }


class RLHFDataset:
    """Read data files into `self.dataframe`; named by `data.custom_cls`, or a base of what is.

    Subclasses override `_read_files_and_tokenize`, `maybe_filter_out_long_prompts` or
    `__getitem__`. A row is a dict of columns (`prompt`, `data_source`, `reward_model`,
    `extra_info`): agentrl renders prompts and drops long ones itself.

    Args:
        data_files: Parquet, JSON or JSONL files.
        tokenizer: None here.
        config: The section `data`, as an OmegaConf mapping.
        processor: None here: images are not supported yet.
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
        """Do nothing: files are on this machine."""

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
