"""Weights as a module names them -> weights as the model's files do, which SGLang's loaders read.

transformers may hold several of a file's tensors as one (the experts of a layer), under a name of
its own. It knows the way back, and it is taken for one weight at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl.engines.sglang.buckets import NamedTensor
from agentrl.errors import EngineError


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
