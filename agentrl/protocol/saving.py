"""Save and load a batch as one safetensors file.

There is no pickle, so loading a file runs no code. Objects are saved as JSON in one more tensor of
bytes, because the header of the file has a limited size.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError
from agentrl.messages import dump_json, restore_numbers

_FORMAT = {"format": "agentrl.DataProto", "version": "1"}
_JSON_KEY = "__json__"


def write_columns(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    non_tensors: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
) -> None:
    """Write the columns of a batch.

    Raises:
        DataError: If JSON cannot hold an object, with its key and row.
    """
    columns = {
        key: [_to_json(value, f"{key!r} in row {row}") for row, value in enumerate(values)]
        for key, values in non_tensors.items()
    }
    facts = {key: _to_json(value, f"meta_info {key!r}") for key, value in meta_info.items()}
    text = dump_json({"non_tensors": columns, "meta_info": facts}, for_file=True)
    # Cloned, because tensors that share memory cannot be saved in one file.
    plain = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in tensors.items()
    }
    plain[_JSON_KEY] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with atomic_file(Path(path)) as draft:
        save_file(plain, draft, metadata=_FORMAT)


def read_columns(
    path: str | Path,
) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]], dict[str, Any]]:
    """Read tensors, objects and facts of a saved batch.

    Raises:
        DataError: If the file is missing, damaged, or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() != _FORMAT:
                raise DataError("not a saved DataProto", file=path, expected=_FORMAT)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read the batch: {error}", file=path) from error
    saved = json.loads(restore_numbers(tensors.pop(_JSON_KEY).numpy().tobytes()))
    return tensors, saved["non_tensors"], saved["meta_info"]


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, np.generic):
        return _to_json(value.item(), where)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(entry, where) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _to_json(entry, where) for key, entry in value.items()}
    raise DataError(
        f"{where} holds a {type(value).__name__}, which cannot be saved",
        expected="JSON values or pydantic models",
    )
