"""Weights put together into buckets of bounded size: flat tensors, filled again and again.

So that much memory is all that an update needs beside the weights, however many there are.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl.errors import EngineError

NamedTensor = tuple[str, Tensor]
FIRST_BYTES = 64 * 1024**2
"""The first bucket's size; it doubles from one to the next, so that a small model takes little."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket; its fields are those that SGLang reads."""

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
    """Where a bucket lies."""

    flat: Tensor
    """`[capacity]`, uint8."""


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, slots=True)
class Bucket(Generic[M]):
    """Tensors side by side without gaps."""

    memory: M
    """Where it lies; filled anew for a later bucket."""
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that are filled."""
        return self.entries[-1].end_idx

    @property
    def flat(self) -> Tensor:
        """All its tensors as one, `[num_bytes]`, uint8."""
        return self.memory.flat[: self.num_bytes]


class PlainMemory:
    """Memory of a device, of this process."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)


def fill_buckets(
    named_tensors: Iterable[NamedTensor],
    bucket_bytes: int,
    allocate: Callable[[int, torch.device], M],
    *,
    in_turn: int = 1,
) -> Iterator[Bucket[M]]:
    """Copy tensors into buckets; each is to be used up, and let go, before the next is asked for.

    Args:
        named_tensors: Read one at a time; none is kept.
        bucket_bytes: Most bytes of all memory together; a larger tensor is alone in its own.
        allocate: Bytes, and where the weights are -> memory.
        in_turn: How many share these bytes and are filled in turn. A reader then has so many
            buckets' time less one to finish before what it reads is overwritten.
    """
    most = bucket_bytes // in_turn
    memory: M | None = None
    resting: deque[M] = deque()
    capacity = min(most, FIRST_BYTES)
    entries: list[Entry] = []
    for name, tensor in named_tensors:
        if memory is not None and not _fits(tensor, _end(entries), memory):
            yield Bucket(memory, tuple(entries))
            resting.append(memory)
            memory, entries, capacity = None, [], min(most, 2 * capacity)
        if memory is None:
            size = max(capacity, tensor.nbytes)
            memory = _rested(resting, size, in_turn, most) or allocate(size, tensor.device)
        entries.append(_put(memory, name, tensor, _end(entries)))
    if memory is not None:
        yield Bucket(memory, tuple(entries))


def _rested(resting: deque[M], size: int, in_turn: int, most: int) -> M | None:
    """The memory whose turn it is; None: more is to be taken."""
    if size > most or any(len(memory.flat) != size for memory in resting):
        resting.clear()  # before another size is taken
    return resting.popleft() if len(resting) == in_turn else None


def _end(entries: list[Entry]) -> int:
    return entries[-1].end_idx if entries else 0


def _fits(tensor: Tensor, start: int, memory: Memory) -> bool:
    """Whether a tensor may stand there: the receiver views its bytes, which must be aligned."""
    return start + tensor.nbytes <= len(memory.flat) and start % tensor.itemsize == 0


def _put(memory: Memory, name: str, tensor: Tensor, start: int) -> Entry:
    end = start + tensor.nbytes
    memory.flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Entry(name, tensor.shape, tensor.dtype, start, end)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What SGLang was started with, as a module without memory."""

    module: PreTrainedModel

    @classmethod
    def of(
        cls, path: str, *, trust_remote_code: bool, overrides: Mapping[str, Any]
    ) -> "ModelWeights":
        """Read a model's configuration; its weights are not read."""
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **overrides)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return cls(module)

    def for_files(self, named_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Check each weight against the model and give it as the model's files have it.

        SGLang itself would break down over a wrong shape, and pass over a weight that is missing.

        Raises:
            EngineError: at a weight of another name or shape, or at the end for those that are
                missing.
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
            yield from self._split(name, tensor)
        if expected:
            raise EngineError(f"weights of the model are missing: {', '.join(list(expected)[:5])}")

    def _split(self, name: str, tensor: Tensor) -> Iterator[NamedTensor]:
        yield from revert_weight_conversion(self.module, {name: tensor}).items()
