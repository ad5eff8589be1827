"""Weights of a Hugging Face folder, read by rows: each rank reads only its own.

The files are read, not mapped: mapped pages would count as memory of the process.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from agentrl.workers.distributed import World
from agentrl.workers.shards import LocalSlice, local_slice

PIECE_BYTES = 2**24
"""Bytes that are read and converted at once."""
_DIGEST_PIECE = 2**22
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Index of its first byte in the file."""

    def read_rows(self, first: int, out: Tensor) -> None:
        """Read rows into a tensor, converted to its type and device.

        Args:
            first: Index of the first row.
            out: The rows, in memory of the caller.
        """
        if not out.numel():
            return
        rows = out if out.ndim else out.view(1)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        pieces = rows.split(max(1, PIECE_BYTES // row_bytes))
        buffer = torch.empty(len(pieces[0]) * row_bytes, dtype=torch.uint8)
        with self.file.open("rb") as stream:
            stream.seek(self.start + first * row_bytes)
            for piece in pieces:
                raw = buffer[: len(piece) * row_bytes]
                if stream.readinto(raw.numpy().data) != len(raw):
                    raise OSError(f"{self.file} is shorter than its header says")
                piece.copy_(raw.view(self.dtype).view(piece.shape))


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The tensors in the safetensors files of a model, by the model's own names."""

    tensors: dict[str, StoredTensor]

    @classmethod
    def find(cls, path: str, lm: PreTrainedModel) -> "WeightFiles | None":
        """Find a model's weights.

        Args:
            path: A folder or a hub name.
            lm: The model, on any device.

        Returns:
            None if the files do not have exactly the model's weights, under its names or under
            names that transformers replaces: then only transformers can load them, or report what
            is wrong.
        """
        if getattr(lm.config, "quantization_config", None) is not None:
            return None
        try:
            stored = _read_headers(list_files(path))
        except (OSError, ValueError, KeyError):
            return None
        loaded, is_converted = loaded_names(stored, lm)
        if is_converted:
            return None
        named = {loaded[name]: tensor for name, tensor in stored.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
        is_whole = all(
            sum(name in named and named[name].shape == shapes[name] for name in names) == 1
            for names in _names_of_each(lm)
        )
        return cls(named) if is_whole else None

    def dtype(self) -> torch.dtype:
        """Return the type of most of the bytes."""
        sizes = dict.fromkeys((tensor.dtype for tensor in self.tensors.values()), 0)
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += math.prod(tensor.shape) * tensor.dtype.itemsize
        return max(sizes, key=sizes.__getitem__)

    @torch.no_grad()
    def fill(self, lm: PreTrainedModel) -> None:
        """Read this rank's slices of all weights and saved buffers."""
        for names in _names_of_each(lm):
            if is_adapter(names[0]):
                continue
            stored = next(name for name in map(base_name, names) if name in self.tensors)
            target = lm.get_parameter_or_buffer(names[0])
            first = 0
            if isinstance(target, DTensor):
                first = compute_local_shape_and_global_offset(
                    target.shape, target.device_mesh, target.placements
                )[1][0]
                target = target.to_local()
            self.tensors[stored].read_rows(first, target.detach())


def is_adapter(name: str) -> bool:
    """Return whether a weight is a matrix of LoRA, and not one of the base."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return the name that a weight has in the files of its model, without peft's wrapper."""
    return name.replace(".base_layer.", ".")


def init_buffers(lm: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers of a model on the meta device, such as rotary frequencies.

    Buffers that a checkpoint holds get a value of no meaning. The weights stay without memory.
    """
    for module in lm.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = torch.empty_like(buffer, device=device)
        module._is_hf_initialized = False  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    lm.initialize_weights()


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the weights of a module on the meta device memory. Tied weights stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, weight in owner._parameters.items():
            if weight is not None and weight.is_meta:
                if weight not in made:
                    memory = torch.empty_like(weight, device=device)
                    made[weight] = nn.Parameter(memory, requires_grad=weight.requires_grad)
                owner._parameters[leaf] = made[weight]
    # FSDP2 keeps references to its shards, which it reads again whenever a module is converted.
    module._apply(lambda tensor: tensor)


def sum_bits(part: LocalSlice) -> int:
    """Add the bits of a slice of a float32 tensor as integers, which is exact in any order."""
    bits = part.local.reshape(-1).view(torch.int32)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(_DIGEST_PIECE))


def sum_placed_bits(part: LocalSlice) -> int:
    """Add the bits of a slice as integers, each times a factor of its position in the tensor.

    Unlike `sum_bits`, this changes if values are exchanged. Sums of slices are sums of the tensor,
    modulo 2**64.
    """
    rows = part.local.detach().reshape(len(part.local) if part.local.ndim else 1, -1)
    bits = rows.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.itemsize])
    columns = torch.zeros((), dtype=torch.int64, device=rows.device)
    for size, start, whole in [*zip(part.local.shape, part.offset, part.shape, strict=True)][1:]:
        columns = columns[..., None] * whole + torch.arange(start, start + size).to(rows.device)
    columns, width = columns.reshape(-1), math.prod(part.shape[1:])
    first = part.offset[0] if part.offset else 0
    total, step = 0, max(1, _DIGEST_PIECE // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        piece = bits[start : start + step].long()
        at = torch.arange(first + start, first + start + len(piece), device=rows.device)
        total += int((piece * (2 * (at[:, None] * width + columns) + 1)).sum())
    return total


def digest_weights(
    weights: Iterable[tuple[str, Tensor]],
    world: World | None,
    sum_slice: Callable[[LocalSlice], int] = sum_bits,
) -> str:
    """Hash the values of some weights, independent of their layout. A collective.

    Args:
        weights: The weights by name.
        world: The ranks that hold slices of them; None: the weights are whole.
        sum_slice: Computes a number of a slice; those of all slices are added, modulo 2**64.
    """
    sums: dict[str, tuple[int, list[int]]] = {}
    for name, weight in weights:
        origin = (0,) * weight.ndim
        whole = LocalSlice(weight, tuple(weight.shape), origin)
        part = whole if world is None else local_slice(weight, world)
        sums[base_name(name)] = 0 if part.copy else sum_slice(part), list(part.shape)
    mine = {name: total for name, (total, _) in sums.items()}
    every = [mine] if world is None else world.gather(mine)
    totals = {name: sum(one[name] for one in every) for name in sorted(sums)}
    content = [
        (name, (total + 2**63) % 2**64 - 2**63, sums[name][1]) for name, total in totals.items()
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


_POOL = 1_048_573
"""Random numbers of stand-in weights; prime, so that no two rows of a matrix are equal."""


@contextmanager
def stand_in_weights(
    lm: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Give a model random weights while the block runs, the same on every rank.

    All weights share the memory of the largest one. Activations keep their size through the layers.
    The buffers move to the device, and stay there.
    """
    own = [(module, dict(module._parameters)) for module in lm.modules()]
    weights = {weight for _, held in own for weight in held.values() if weight is not None}
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    pool = pool.repeat(2 + max(weight.numel() for weight in weights) // _POOL)
    embeddings = cast("nn.Embedding", lm.get_input_embeddings())
    pool *= embeddings.weight.shape[-1] ** -0.5
    made: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for module, held in own:
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(device)
            for leaf, weight in held.items():
                if weight is None:
                    continue
                if weight not in made:
                    # Aligned for every kernel, and not equal to the weight before it.
                    start = len(made) % 1024 * 64
                    random = pool[start : start + weight.numel()].view(weight.shape)
                    is_scale = weight.ndim == 1 and not leaf.endswith("bias")
                    made[weight] = nn.Parameter(torch.ones_like(random) if is_scale else random)
                module._parameters[leaf] = made[weight]
        with torch.no_grad():
            yield
    finally:
        for module, held in own:
            module._parameters.update(held)


def _names_of_each(lm: PreTrainedModel) -> list[list[str]]:
    """List the names of each weight and saved buffer; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def list_files(path: str) -> list[str]:
    """List the safetensors files of a folder or hub name; none if the weights are in others."""
    one = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if one is not None:
        return [one]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    return (get_checkpoint_shard_files(path, index)[0] or []) if index is not None else []


def _read_headers(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files.

    Raises:
        KeyError: for a type that has no counterpart.
    """
    found: dict[str, StoredTensor] = {}
    for file in map(Path, files):
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(num_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start = 8 + num_bytes + entry["data_offsets"][0]
            found[name] = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return found


def weight_names(lm: PreTrainedModel) -> set[str]:
    """Return the names of a model's weights and saved buffers, all names of tied ones."""
    return {base_name(name) for name in lm.state_dict() if not is_adapter(name)}


def loaded_names(stored: Iterable[str], lm: PreTrainedModel) -> tuple[dict[str, str], bool]:
    """Rename tensors as transformers does when it loads them.

    Returns:
        The weight that each tensor is read into, and whether some weights are computed from several
        tensors, or several from one. A tensor that the model has no place for has another name.
    """
    prefix, known = f"{lm.base_model_prefix}.", weight_names(lm)
    conversions = get_model_conversion_mapping(lm)
    conversions.sort(key=lambda one: not isinstance(one, WeightRenaming))
    renamed, is_converted = dict[str, str](), False
    for name in sorted(stored):
        new = name
        for conversion in conversions:
            new, matched = conversion.rename_source_key(new)
            if matched is not None and not isinstance(conversion, WeightRenaming):
                is_converted = True
                break
        renamed[name] = prefix + new if new not in known and prefix + new in known else new
    return renamed, is_converted
