"""Pickle a batch for another process: only the bytes of its rows, outside of the pickle stream.

A tensor that is a view of a larger one is pickled by torch with the whole larger one: each of eight
chunks of a batch would carry the whole batch. Here tensors travel as contiguous numpy arrays, which
pickle's protocol 5 hands over without a copy (Ray puts them into its object store in this way).
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.protocol.columns import tensor_columns

Packed = dict[str, tuple[torch.dtype, np.ndarray]]
"""Tensors by name: the dtype, and the bytes as an array of `[B, ...]`."""

_CARRIERS = {1: np.uint8, 2: np.int16}
"""Numpy dtypes for the bytes of dtypes that numpy does not have, by their size."""


def pack_tensors(batch: TensorDict | None) -> Packed | TensorDict | None:
    """Return the tensors of a batch as arrays; a batch with other tensors than plain ones as is."""
    tensors = tensor_columns(batch)
    if batch is None or not all(map(_is_plain, tensors.values())):
        return batch
    return {name: (tensor.dtype, _to_array(tensor)) for name, tensor in tensors.items()}


def unpack_tensors(packed: Packed | TensorDict | None) -> TensorDict | None:
    """Return the batch. Its tensors can be written to: an array of shared memory is copied."""
    if packed is None or isinstance(packed, TensorDict):
        return packed
    tensors = {name: _to_tensor(dtype, array) for name, (dtype, array) in packed.items()}
    num_rows = next(iter(tensors.values())).shape[0]
    return TensorDict(tensors, batch_size=[num_rows])


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and (_has_numpy_dtype(value.dtype) or value.element_size() in _CARRIERS)
    )


def _has_numpy_dtype(dtype: torch.dtype) -> bool:
    return dtype == torch.bool or (
        dtype.is_complex or not dtype.is_floating_point or dtype.itemsize > 2 or dtype == torch.half
    )


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if _has_numpy_dtype(tensor.dtype):
        return tensor.numpy()
    carrier = torch.uint8 if tensor.element_size() == 1 else torch.int16
    return tensor.view(carrier).numpy()


def _to_tensor(dtype: torch.dtype, array: np.ndarray) -> torch.Tensor:
    writable: Any = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable).view(dtype)
