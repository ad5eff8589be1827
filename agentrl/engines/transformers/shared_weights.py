"""A second module of the same architecture that shares the trainer's weights.

The engine needs another attention implementation, evaluation mode and no hooks, and the trainer's
module must not change. So the engine has its own module, and only the tensors are shared.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.engines.tied_head import is_tied
from agentrl.engines.transformers.paged_attention import ATTENTION_NAME
from agentrl.engines.vision import has_vision
from agentrl.errors import EngineError

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")
"""Prefixes that activation checkpointing, `torch.compile` and peft add to parameter names."""


class SharedWeights:
    """The engine's module, with shared and own tensors.

    A shared tensor is never written: if it gets other values, the module gets its own tensor.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        # For each parameter's name, all names of the same parameter.
        self._groups = {name: tuple(group) for group in names.values() for name in group}
        self._buffers = {name for name, _ in module.named_buffers()} & set(module.state_dict())
        self._owned: set[str] = set()
        self.is_complete = False
        """Whether every weight has its value."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        attention: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Build the engine's module for the trainer's.

        Parameters share storage if they are whole on this rank, on `device` (None: each where it
        is) and of type `dtype` (None: each as it is). Shards, and weights with an adapter of LoRA,
        have no values until `update`.

        Raises:
            EngineError: The module is not a Hugging Face model, or FSDP has gathered its parameters
                (call `reshard()` before).
        """
        source = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        if not isinstance(source, PreTrainedModel):
            raise EngineError(
                f"cannot generate with a {type(source).__name__}",
                expected="a transformers PreTrainedModel",
            )
        shared = cls(_empty_twin(source, attention))
        given = [(name, p) for name, p in source.named_parameters() if not _is_adapter(name)]
        parameters = {_plain_name(name): p for name, p in given}
        adapted = {_plain_name(name) for name, _ in given if ".base_layer." in name}
        if isinstance(source, FSDPModule) and not any(
            isinstance(p, DTensor) for p in parameters.values()
        ):
            raise EngineError("the FSDP module is gathered; reshard it before sharing its weights")
        _copy_buffers(source, shared.module, device)
        is_shared = [
            shared._share(
                name,
                parameter,
                dtype or parameter.dtype,
                device or parameter.device,
                has_own_values=name in adapted,
            )
            for name, parameter in parameters.items()
        ]
        shared.is_complete = all(is_shared)
        return shared

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Set values by parameter name. A tensor with the same memory is not copied.

        Args:
            named_tensors: Whole tensors of the module's shapes, of any type. A tied weight may
                have each of its names or one of them. Buffers of the state dict are allowed.

        Returns:
            Copied bytes.

        Raises:
            EngineError: A name is unknown, a shape differs, or weights are missing. The module is
                incomplete until a complete update.
        """
        self.is_complete = False
        unknown: list[str] = []
        missing = dict.fromkeys(self._groups)
        num_bytes = 0
        for raw_name, tensor in named_tensors:
            name = _plain_name(raw_name)
            if name in self._groups:
                num_bytes += self._take(name, _whole(name, tensor))
                for tied in self._groups[name]:
                    missing.pop(tied, None)
            elif name in self._buffers:
                num_bytes += self.module.get_buffer(name).copy_(_whole(name, tensor)).nbytes
            else:
                unknown.append(name)
        if unknown or missing:
            raise EngineError(
                "the given weights are not those of the model",
                unknown=", ".join(unknown) or None,
                missing=", ".join(missing) or None,
            )
        self.is_complete = True
        return num_bytes

    def _share(
        self,
        name: str,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_own_values: bool,
    ) -> bool:
        """Bind one of the trainer's parameters; a shard, or one of other values, gets own memory.

        Returns:
            Whether the parameter has its value.
        """
        is_shard = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
        if is_shard or has_own_values:
            self._bind(name, torch.empty(parameter.shape, dtype=dtype, device=device))
            self._owned.add(self._groups[name][0])
            return False
        whole = _whole(name, parameter)
        if (whole.dtype, whole.device) != (dtype, device):
            self._owned.add(self._groups[name][0])
        self._bind(name, whole.to(device, dtype))
        return True

    def _take(self, name: str, tensor: torch.Tensor) -> int:
        """Set a weight's values, and return the copied bytes."""
        current = self.module.get_parameter(name).data
        if tensor.shape != current.shape:
            raise EngineError(
                f"weight {name!r} has the wrong shape {tuple(tensor.shape)}",
                expected=tuple(current.shape),
            )
        if tensor.data_ptr() == current.data_ptr() and tensor.dtype == current.dtype:
            return 0
        if self._groups[name][0] in self._owned:
            return current.copy_(tensor).nbytes
        self._bind(name, tensor.to(current, copy=True))
        self._owned.add(self._groups[name][0])
        return current.nbytes

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for tied in self._groups[name]:
            path, _, leaf = tied.rpartition(".")
            setattr(self.module.get_submodule(path), leaf, parameter)


def _empty_twin(source: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Return a module of the same class without memory, in evaluation mode."""
    plain_class = next(
        cls
        for cls in type(source).__mro__
        if issubclass(cls, PreTrainedModel) and not issubclass(cls, FSDPModule)
    )
    config = copy.deepcopy(source.config)
    if not is_tied(source):
        config.tie_word_embeddings = False
    with torch.device("meta"):
        twin = plain_class._from_config(
            config, attn_implementation=_attention_by_part(plain_class, config, attention)
        )
    return twin.requires_grad_(False).eval()


def _attention_by_part(
    model_class: type[PreTrainedModel], config: PretrainedConfig, attention: str
) -> str | dict[str, str]:
    """Return the attention of each part of a model: paged attention is only for its text part."""
    if attention != ATTENTION_NAME or not has_vision(config):
        return attention
    tower = "sdpa" if model_class._supports_sdpa else "eager"
    text = config.get_text_config()
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": attention} | {
        name: attention if part is text else tower for name, part in parts.items()
    }


def _copy_buffers(source: nn.Module, twin: nn.Module, device: torch.device | None) -> None:
    """Copy all buffers, also those that are not in the state dict (rotary frequencies)."""
    buffers = {_plain_name(name): buffer for name, buffer in source.named_buffers()}
    for name, _ in list(twin.named_buffers()):
        path, _, leaf = name.rpartition(".")
        # Copied, because rotary embeddings that depend on the length replace theirs while they run.
        twin.get_submodule(path)._buffers[leaf] = buffers[name].detach().to(device, copy=True)


def _plain_name(name: str) -> str:
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.size() > 1:
            raise EngineError(
                f"weight {name!r} is a shard", expected="full tensors (`DTensor.full_tensor()`)"
            )
        tensor = tensor.to_local()
    return tensor.detach()
