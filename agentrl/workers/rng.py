"""Save and restore the random state of a process; choose deterministic kernels."""

import base64
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of all global random streams of one rank, as JSON values."""

    python: list[Any]
    numpy: dict[str, Any]
    torch_cpu: str
    """base64."""
    torch_cuda: list[str]
    """base64, of the rank's own device; in earlier checkpoints, of each device."""


def seed_everything(seed: int) -> None:
    """Seed all global random streams."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def choose_exact_kernels(device: torch.device) -> None:
    """Use deterministic kernels in this process from now on.

    Otherwise a CPU with several threads sums the gradient of an indexed tensor in a random order.
    An accelerator has no deterministic kernel for some operations: torch warns and runs the others.
    """
    # Read by cuBLAS when it is first used; without it, matrix products are not deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Every `torch.empty` would be filled, including blocks of logits that are overwritten.
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")


def capture_random_state() -> RandomState:
    """Read the state of the streams."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    words_np = numpy_state["state"]["key"].tolist()
    state = {**numpy_state["state"], "key": words_np}
    # Not those of all devices: other ranks use them.
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return RandomState(
        python=[version, list(words), gauss],
        numpy={**numpy_state, "state": state},
        torch_cpu=_encode(torch.get_rng_state()),
        torch_cuda=[_encode(tensor) for tensor in cuda],
    )


def restore_random_state(state: RandomState) -> None:
    """Restore the streams; without a CUDA device, those of the CPU."""
    version, words, gauss = state.python
    random.setstate((version, tuple(words), gauss))
    inner = state.numpy["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**state.numpy, "state": {**inner, "key": key}})
    torch.set_rng_state(_decode(state.torch_cpu))
    cuda = state.torch_cuda
    if torch.cuda.is_available() and cuda:
        own = torch.cuda.current_device()
        torch.cuda.set_rng_state(_decode(cuda[own if own < len(cuda) else 0]))


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
