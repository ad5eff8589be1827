"""CUDA devices that do not exist: real tensors on the CPU that claim to be on `cuda:0`, `cuda:1`.

`pretend_cuda` makes torch report devices that this machine does not have. A tensor that is made on
or moved to one of them is computed on the CPU, and its memory is marked with the device, so that
views have the mark too. `Tensor.device` reports the mark. Every ATen operation is checked:

- its tensors must be on one device (with torch's exceptions: copies, indices on the CPU, tensors of
  the CPU without dimensions in elementwise operations);
- the device must be the current one of the thread, because kernels outside torch use that;
- an operation for which the host waits for the device is counted.

FakeTensorMode does the first without memory, but a run's numbers steer it: lengths, samples, norms.
Threads that start within the block are checked too. Streams, events and graphs do nothing.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.flash_attention import KERNELS

CPU = torch.device("cpu")
TOTAL_BYTES = 2**30
"""Memory of a device."""


class DeviceMixError(RuntimeError):
    """An operation has tensors on several devices."""


class CurrentDeviceError(RuntimeError):
    """An operation is on another device than the current one of its thread."""


class PretendCuda:
    """What happened on the devices."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.num_waits: Counter[str] = Counter()
        """How often the host waited for a device, by operation."""
        self.generators = {index: b"device %d" % index for index in range(num_devices)}
        """The state of each device's random numbers."""
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The current device of this thread; a new thread has device 0."""
        return getattr(self._thread, "device", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._thread.device = index

    @property
    def asked(self) -> torch.device | None:
        """The device that Python code of this thread asks for in the running call."""
        return getattr(self._thread, "asked", None)

    @contextmanager
    def asking_for(self, device: torch.device) -> Iterator[None]:
        """Note the device of a call that copies a tensor, or makes one like another."""
        self._thread.asked = device
        try:
            yield
        finally:
            self._thread.asked = None

    def resolve(self, device: Any) -> torch.device:
        """Return a device with its index."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        found = torch.device(device)
        if found.type == "cuda" and found.index is None:
            return torch.device("cuda", self.current)
        return found


@contextmanager
def pretend_cuda(num_devices: int = 2) -> Iterator[PretendCuda]:
    """Pretend that this machine has CUDA devices. The block's own thread starts on device 0."""
    pretend = PretendCuda(num_devices)
    _device_constructors()  # cached: `with torch.device(...)` looks for the functions of torch
    with pytest.MonkeyPatch.context() as patch:
        _patch_tensors(patch, pretend)
        _patch_cuda(patch, pretend)
        _patch_ranks(patch)
        run = threading.Thread.run

        def run_checked(thread: threading.Thread) -> None:
            with _Checks(pretend):
                run(thread)

        patch.setattr(threading.Thread, "run", run_checked)
        torch.get_device_module.cache_clear()
        with _Checks(pretend):
            yield pretend
    torch.get_device_module.cache_clear()


_plain_device: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor claims to be on."""
    while isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if _plain_device(tensor).type != "cpu":
        return _plain_device(tensor)
    return getattr(tensor.untyped_storage(), "pretend_device", CPU)


def _mark(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        tensor.untyped_storage().pretend_device = device  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments, which nest lists only."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class _Checks(TorchDispatchMode):
    """Checks and marks the tensors of every operation of a thread."""

    def __init__(self, pretend: PretendCuda) -> None:
        super().__init__()
        self._pretend = pretend

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors are checked
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        inputs = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        device = _common_device(name, args, inputs)
        wanted = kwargs.get("device")
        if name.startswith("new_") or name.endswith(("_like", "_to_copy")):
            # The formulas of gradients name the plain device of a tensor: that is no request.
            wanted = self._pretend.asked or (None if wanted == CPU else wanted)
        if wanted is not None:
            device = self._pretend.resolve(wanted)
            kwargs["device"] = CPU if device.type == "cuda" else device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if device.type == "cuda" and device.index != self._pretend.current:
            raise CurrentDeviceError(
                f"{func} runs on {device}, and the current device of thread "
                f"{threading.current_thread().name!r} is cuda:{self._pretend.current}"
            )
        self._count_waits(name, args, inputs, device)
        result = KERNELS.get(name, func)(*args, **kwargs)
        known = {id(tensor.untyped_storage()) for tensor in inputs}
        for output in _tensors_in((result,)):
            if id(output.untyped_storage()) not in known:
                _mark(output, device)
        return result

    def _count_waits(
        self, name: str, args: Any, inputs: Sequence[Tensor], device: torch.device
    ) -> None:
        on_cuda = [tensor for tensor in inputs if device_of(tensor).type == "cuda"]
        if not on_cuda:
            return
        has_mask = name.startswith("index") and any(
            leaf.dtype in (torch.bool, torch.uint8) for leaf in _tensors_in(args[1:])
        )
        is_read = name in ("_to_copy", "copy_") and (
            device.type == "cpu" or device_of(args[0]).type == "cpu"
        )
        if name in _WAITING or has_mask or is_read:
            self._pretend.num_waits[name] += 1


_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "bincount", "repeat_interleave",
}  # fmt: skip
"""Operations of which the host needs a result."""
_COPIES = {
    "copy_",
    "_to_copy",
    "_copy_from",
    "set_",
    "_foreach_copy_",
    "_has_compatible_shallow_copy_type",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_NOT_ELEMENTWISE = ("_fused_", "cat", "gather", "scatter", "index_", "embedding", "_foreach_norm")
"""Beginnings of names; these operations do not take a tensor of the CPU without dimensions."""


def _common_device(name: str, args: Any, inputs: Sequence[Tensor]) -> torch.device:
    if name in _COPIES:
        return device_of(inputs[0])
    if name in _INDEXING and device_of(args[0]).type == "cuda":
        values = [leaf for leaf in args[2:] if isinstance(leaf, Tensor) and leaf.ndim]
        inputs = [args[0], *values]
    devices = {device_of(tensor): tensor for tensor in reversed(inputs)}
    if len(devices) > 1 and not name.startswith(_NOT_ELEMENTWISE):
        devices = {
            device: one
            for device, one in devices.items()
            if device.type == "cuda"
            or any(tensor.ndim for tensor in inputs if device_of(tensor) == device)
        }
    if len(devices) > 1:
        what = ", ".join(f"{tuple(t.shape)} on {device_of(t)}" for t in inputs)
        raise DeviceMixError(f"{name}: tensors on several devices: {what}")
    return next(iter(devices), CPU)


def _patch_tensors(patch: pytest.MonkeyPatch, pretend: PretendCuda) -> None:
    """Replace the methods of tensors that read or change the device outside of an operation."""
    plain_to, plain_tolist, plain_numpy = Tensor.to, Tensor.tolist, Tensor.numpy

    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype = device_of(tensor), kwargs.pop("dtype", None)
        for one in (*args, kwargs.pop("device", None), kwargs.pop("other", None)):
            if isinstance(one, Tensor):
                device, dtype = device_of(one), one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif one is not None and not isinstance(one, bool):
                device = pretend.resolve(one)
        dtype = tensor.dtype if dtype is None else dtype
        is_moved = device != device_of(tensor) and not isinstance(tensor, DTensor)
        if is_moved and device.type in ("cpu", "cuda"):
            with pretend.asking_for(device):
                return torch.ops.aten._to_copy(tensor, dtype=dtype, device=CPU)
        if device.type not in ("cpu", "cuda"):
            return plain_to(tensor, device, dtype, copy=copy)
        return plain_to(tensor, dtype, copy=copy, **kwargs)

    def tolist(tensor: Tensor) -> Any:
        if device_of(tensor).type == "cuda":
            pretend.num_waits["tolist"] += 1
        return plain_tolist(tensor)

    def numpy(tensor: Tensor, **kwargs: Any) -> Any:
        if device_of(tensor).type != "cpu":
            raise TypeError(f"can't convert {device_of(tensor)} device type tensor to numpy")
        return plain_numpy(tensor, **kwargs)

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        pinned.untyped_storage().pretend_pinned = True  # pyright: ignore[reportAttributeAccessIssue]
        return pinned

    def made(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None and isinstance(data, Tensor):
                return plain(data, *args, **kwargs)
            kwargs.pop("pin_memory", None)
            tensor = plain(data, *args, **kwargs)
            return tensor if device is None else to(tensor, device)

        return make

    def made_like(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None:
                return plain(*args, **kwargs)
            with pretend.asking_for(pretend.resolve(device)):
                return plain(*args, device=CPU, **kwargs)

        return make

    patch.setattr(Tensor, "device", property(device_of), raising=False)
    patch.setattr(Tensor, "is_cuda", property(lambda t: device_of(t).type == "cuda"), raising=False)
    patch.setattr(Tensor, "is_cpu", property(lambda t: device_of(t).type == "cpu"), raising=False)
    patch.setattr(Tensor, "get_device", lambda t: device_of(t).index, raising=False)
    patch.setattr(Tensor, "to", to, raising=False)
    patch.setattr(Tensor, "cpu", lambda t, **_: to(t, CPU), raising=False)
    patch.setattr(Tensor, "cuda", lambda t, device="cuda", *_, **__: to(t, device), raising=False)
    patch.setattr(Tensor, "type_as", lambda t, other: to(t, other), raising=False)
    patch.setattr(Tensor, "tolist", tolist, raising=False)
    patch.setattr(Tensor, "numpy", numpy, raising=False)
    patch.setattr(Tensor, "pin_memory", pin_memory, raising=False)
    patch.setattr(
        Tensor,
        "is_pinned",
        lambda t: hasattr(t.untyped_storage(), "pretend_pinned"),
        raising=False,
    )
    patch.setattr(Tensor, "record_stream", lambda *_: None, raising=False)
    for name in ("tensor", "as_tensor"):
        patch.setattr(torch, name, made(getattr(torch, name)))
    for name in ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"):
        patch.setattr(torch, name, made_like(getattr(torch, name)))
    for name in ("new_zeros", "new_ones", "new_empty", "new_full"):
        patch.setattr(Tensor, name, made_like(getattr(Tensor, name)), raising=False)
    wrap = Tensor._make_wrapper_subclass

    def make_wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        is_pretend = device is not None and torch.device(device).type == "cuda"
        return wrap(*args, device=CPU if is_pretend else device, **kwargs)

    patch.setattr(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper), raising=False)


class _Stream:
    """A stream or event: everything is in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Stream() if name == "record_event" else name == "query"


def _patch_cuda(patch: pytest.MonkeyPatch, pretend: PretendCuda) -> None:
    """Replace what torch says of devices and does with them outside of operations."""

    def set_device(device: Any) -> None:
        index = pretend.resolve(device).index
        if not 0 <= index < pretend.num_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        pretend.current = index

    def synchronize(device: Any = None) -> None:
        pretend.num_waits["synchronize"] += 1

    @contextmanager
    def device_context(device: Any) -> Iterator[None]:
        before = pretend.current
        set_device(device)
        try:
            yield
        finally:
            pretend.current = before

    def get_rng_state(device: Any = "cuda") -> Tensor:
        state = pretend.generators[pretend.resolve(device).index]
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_rng_state(state: Tensor, device: Any = "cuda") -> None:
        pretend.generators[pretend.resolve(device).index] = state.numpy().tobytes()

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    zero: Callable[..., int] = lambda *_, **__: 0  # noqa: E731
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing,
        "device_count": lambda: pretend.num_devices,
        "current_device": lambda: pretend.current,
        "set_device": set_device,
        "device": device_context,
        "synchronize": synchronize,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "mem_get_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_reserved": zero,
        "memory_allocated": zero,
        "max_memory_allocated": zero,
        "max_memory_reserved": zero,
        "reset_peak_memory_stats": nothing,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "a pretended device",
        "get_device_properties": lambda *_: _Properties(),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(n) for n in range(pretend.num_devices)],
        "set_rng_state": set_rng_state,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda *_: nullcontext(),
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)
    cuda = torch.device("cuda")
    for name, value in {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: cuda,
        "device_count": lambda: pretend.num_devices,
        "synchronize": synchronize,
        "current_device_index": lambda: pretend.current,
        "empty_cache": nothing,
        "current_stream": _Stream,
        "memory_reserved": zero,
        "memory_allocated": zero,
        "get_memory_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES),
    }.items():
        patch.setattr(torch.accelerator, name, value, raising=False)
    patch.setattr(torch._C, "_get_accelerator", lambda *_: cuda)

    def refuse_to_compile(*_: Any, **__: Any) -> None:
        raise RuntimeError("there is no compiler for devices that do not exist")

    patch.setattr(torch, "compile", refuse_to_compile)


class _Properties:
    name = "a pretended device"
    major, minor = 9, 0
    total_memory = TOTAL_BYTES
    multi_processor_count = 1
    uuid = "0"


def _patch_ranks(patch: pytest.MonkeyPatch) -> None:
    """Exchange by gloo what NCCL would: the memory is the CPU's."""
    plain = dist.init_process_group

    def init(backend: str | None = None, **kwargs: Any) -> None:
        plain("cpu:gloo,cuda:gloo" if backend and "nccl" in backend else backend, **kwargs)

    patch.setattr(dist, "init_process_group", init)
