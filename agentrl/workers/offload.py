"""Memory that is on the device only while it is used: weights and moments, and activations."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn


class OffloadedMemory:
    """Keeps the memory of tensors in the host between uses.

    The storages stay the same objects: each alias of a tensor (an optimizer's, FSDP2's) is valid
    again when the memory is back.

    Args:
        tensors: Returns the tensors that are offloaded at the end of a use.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._num_uses = 0
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Bytes of each storage, and their copy in the host."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the tensors in their own memory while the block runs. Blocks may be nested."""
        if not self._num_uses:
            self._bring_back()
        self._num_uses += 1
        try:
            yield
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._offload()

    def _bring_back(self) -> None:
        for device, host in self._copies:
            device.untyped_storage().resize_(host.nbytes)
            device.copy_(host, non_blocking=True)

    def _offload(self) -> None:
        kept = {device.untyped_storage()._cdata: host for device, host in self._copies}
        copies = dict[int, tuple[Tensor, Tensor]]()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage._cdata in copies or not storage.nbytes():
                continue
            device = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = kept.get(storage._cdata)
            if host is None or host.shape != device.shape:
                pinned = device.device.type == "cuda"
                host = torch.empty(device.shape, dtype=torch.uint8, pin_memory=pinned)
            host.copy_(device, non_blocking=True)
            copies[storage._cdata] = device, host
        self._copies = list(copies.values())
        for device, _ in self._copies:
            device.untyped_storage().resize_(0)


def offload_activations() -> AbstractContextManager[object]:
    """Move what the forward pass keeps for the backward pass to the host, except weights.

    With activation checkpointing, these are the inputs of the layers.
    """

    def to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        source = tensor._base if tensor._is_view() else tensor
        if isinstance(source, nn.Parameter) or not tensor.is_floating_point():
            return tensor
        pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host = kept
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(to_host, to_device)
