"""Weights under the names of the model's files, packed into buckets of bounded size.

An update needs only the memory of its buckets besides the weights, however many weights there are.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.vision import has_vision, language_model
from agentrl.errors import ConfigError, EngineError

NamedTensor = tuple[str, Tensor]
_PATCH_SIZE = 14
FIRST_BYTES = 64 * 1024**2
"""The first bucket's size. Each later one is twice as large, so a small model needs little."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket, with the fields that SGLang reads."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    """Its first byte."""
    end_idx: int

    @property
    def numel(self) -> int:
        """Bytes, which are the elements of the flat tensor."""
        return self.end_idx - self.start_idx


class Memory(Protocol):
    """The memory of a bucket."""

    flat: Tensor
    """`[capacity]`, uint8."""


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, slots=True)
class Bucket(Generic[M]):
    """Tensors packed without gaps."""

    memory: M
    """Reused for a later bucket."""
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return self.entries[-1].end_idx

    @property
    def flat(self) -> Tensor:
        """All tensors as one, `[num_bytes]`, uint8."""
        return self.memory.flat[: self.num_bytes]


class PlainMemory:
    """Memory of a device that belongs to this process."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)


def fill_buckets(
    named_tensors: Iterable[NamedTensor],
    bucket_bytes: int,
    allocate: Callable[[int, torch.device], M],
    *,
    num_buffers: int = 1,
) -> Iterator[Bucket[M]]:
    """Copy tensors into buckets. The caller must drop each bucket before it takes the next.

    Args:
        named_tensors: Read one at a time; none is kept.
        bucket_bytes: Most bytes of all memory together; a larger tensor gets memory of its own.
        allocate: Makes memory from a number of bytes and the weights' device.
        num_buffers: Memories that share these bytes and are filled in turn. A reader may still read
            a bucket while the next `num_buffers - 1` buckets are filled.
    """
    max_bytes = bucket_bytes // num_buffers
    memory: M | None = None
    free: deque[M] = deque()
    capacity = min(max_bytes, FIRST_BYTES)
    entries: list[Entry] = []
    for name, tensor in named_tensors:
        if memory is not None and not _fits(tensor, _end(entries), memory):
            yield Bucket(memory, tuple(entries))
            free.append(memory)
            memory, entries, capacity = None, [], min(max_bytes, 2 * capacity)
        if memory is None:
            size = max(capacity, tensor.nbytes)
            if size > max_bytes or any(len(other.flat) != size for other in free):
                free.clear()  # before memory of another size is allocated
            is_reused = len(free) == num_buffers
            memory = free.popleft() if is_reused else allocate(size, tensor.device)
        entries.append(_put(memory, name, tensor, _end(entries)))
    if memory is not None:
        yield Bucket(memory, tuple(entries))


def _end(entries: list[Entry]) -> int:
    return entries[-1].end_idx if entries else 0


def _fits(tensor: Tensor, start: int, memory: Memory) -> bool:
    """Return whether a tensor fits at `start`, where its bytes must be aligned for the receiver."""
    return start + tensor.nbytes <= len(memory.flat) and start % tensor.itemsize == 0


def _put(memory: Memory, name: str, tensor: Tensor, start: int) -> Entry:
    end = start + tensor.nbytes
    memory.flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Entry(name, tensor.shape, tensor.dtype, start, end)


def check_tower(config: PretrainedConfig) -> None:
    """Refuse a vision tower on which SGLang would fail at the first image.

    Raises:
        ConfigError: Its patches have a size that SGLang does not support.
    """
    size = config.vision_config.patch_size if config.model_type == "qwen2_5_vl" else _PATCH_SIZE
    if size != _PATCH_SIZE:
        raise ConfigError(
            f"SGLang does not run a tower of Qwen2.5-VL with patches of {size} pixels",
            key="model.path",
            expected=f"vision_config.patch_size {_PATCH_SIZE}, or rollout.engine.name transformers",
        )


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The model that SGLang was started with, as a module without memory.

    transformers may hold several tensors of a file as one (the experts of a layer), under another
    name. SGLang's loaders read the tensors and names of the files.
    """

    module: PreTrainedModel

    @classmethod
    def of(cls, needs: SGLangNeeds) -> "ModelWeights":
        """Read a model's configuration; its weights are not read."""
        config = AutoConfig.from_pretrained(
            needs.model_path, trust_remote_code=needs.trust_remote_code, **needs.override_config
        )
        check_tower(config)
        auto = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
        with torch.device("meta"):
            module = auto.from_config(config, trust_remote_code=needs.trust_remote_code)
        return cls(module)

    @property
    def has_tower(self) -> bool:
        """Whether the model has a vision tower."""
        return has_vision(self.module.config)

    def for_files(self, named_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Check each weight against the model, and convert it to the tensors of the files.

        SGLang itself would fail on a wrong shape, and ignore a missing weight. Weights of a vision
        tower and its projector may be missing, because a frozen tower is not sent.

        Raises:
            EngineError: A weight has another name or shape, or weights are missing at the end.
        """
        expected = {name: weight.shape for name, weight in self.module.named_parameters()}
        for name, tensor in named_tensors:
            shape = expected.pop(name, None)
            if shape != tensor.shape:
                raise EngineError(
                    f"weight {name!r} of shape {tuple(tensor.shape)} is not one of the model that "
                    "SGLang was started with",
                    expected=f"shape {tuple(shape)}" if shape else "each of its names once",
                )
            yield from revert_weight_conversion(self.module, {name: tensor}).items()
        of_tower = self._of_tower() if self.has_tower else set[str]()
        missing = [name for name in expected if name not in of_tower]
        if missing:
            raise EngineError(f"weights of the model are missing: {', '.join(missing[:5])}")

    def _of_tower(self) -> set[str]:
        """Return the names of the weights that are not the language model's."""
        language = [language_model(self.module), self.module.get_output_embeddings()]
        kept = {id(weight) for part in language if part is not None for weight in part.parameters()}
        named = self.module.named_parameters()
        return {name for name, weight in named if id(weight) not in kept}
