"""The critic's module: the body of a causal LM with a scalar head.

A saved critic is the folder of a token classifier with one label: `score.weight` and `score.bias`
are next to the weights of the body.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import CriticModelConfig, FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.attention import find_noise
from agentrl.workers.distributed import World
from agentrl.workers.load import (
    enable_checkpointing,
    load_causal_lm,
    load_hf_config,
    make_empty_lm,
    resolve_dtype,
)
from agentrl.workers.model import PackedModel
from agentrl.workers.packing import PackedBatch
from agentrl.workers.sequence_parallel import check_heads
from agentrl.workers.shards import local_slice
from agentrl.workers.vision_tower import freeze_tower
from agentrl.workers.weight_files import WeightFiles, stand_in_weights

logger = logging.getLogger(__name__)

HEAD = "score"
"""Name of the head, as in the classifiers of transformers."""


class ValueModel(PackedModel):
    """The body of a causal LM with a scalar head, which computes the values of trained tokens.

    The value of a token is that of the state before it, as its log-probability is: it is computed
    from the hidden state that predicts the token. The head computes in float32.

    Args:
        lm: The Hugging Face model without its own head (`drop_head`), float32.
        world: The ranks that shard it.
        compute_dtype: The dtype of its layers.
        fsdp: Settings of the sharding.
        files: The weights of a model that is on the meta device; each rank reads its slices. If
            they have no scalar head, it is 0: all values are 0.
        stored_dtype: The dtype of an export; None: that of `lm`.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        world: World,
        compute_dtype: torch.dtype,
        fsdp: FsdpConfig,
        *,
        files: WeightFiles | None = None,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(lm, world, compute_dtype, stored_dtype=stored_dtype)
        with stand_in_weights(lm, world.device, torch.float32):
            self.check_packing(self._project)
        self.score = nn.Linear(self.text_config.hidden_size, 1, device=lm.device)
        self.place(fsdp, files)
        self._fill_head(files)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Compute the values of the trained tokens of a micro-batch, `[N]` float32."""
        return self._run_one(packed, lambda hidden: self.score(hidden.float()).squeeze(-1))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the sharded weights by Hugging Face name: the body, then the head."""
        head = self.score.named_parameters(prefix=HEAD)
        return chain(super().named_weights(), head)

    def float32_modules(self) -> Iterable[nn.Module]:
        """Iterate over the modules that compute in float32, for any compute dtype."""
        return (self.score,)

    def _project(self, packed: PackedBatch) -> Tensor:
        """Return the component of each state in a random direction, `[N]`: numbers of size 1."""
        size = self.text_config.hidden_size
        direction = torch.randn(size, generator=torch.Generator().manual_seed(0)) / size**0.5
        return self._run_one(packed, lambda hidden: hidden.float() @ direction.to(hidden.device))

    @torch.no_grad()
    def _fill_head(self, files: WeightFiles | None) -> None:
        """Read this rank's part of the head, or make it 0."""
        stored = {} if files is None else files.tensors
        for name, weight in self.score.named_parameters(prefix=HEAD):
            part = local_slice(weight, self.world)
            if name not in stored:
                part.local.zero_()
            elif stored[name].shape != part.shape:
                raise ConfigError(
                    f"{name} has the shape {list(stored[name].shape)}",
                    key="critic.model.path",
                    expected=f"a scalar head, {list(part.shape)}, or a model without {HEAD}",
                )
            else:
                stored[name].read_rows(part.offset[0], part.local)


def load_value_model(
    config: CriticModelConfig, model: ModelConfig, world: World, fsdp: FsdpConfig
) -> ValueModel:
    """Load a critic from a folder of its own, or from the policy's. A collective.

    Args:
        config: The critic's folder and how it is computed.
        model: The policy's section: its folder, if the critic has none, and its dtype.
        world: The ranks.
        fsdp: Settings of the sharding.

    Raises:
        ConfigError: as `load_policy`, and for a head that is not scalar.
    """
    own = choose_model(config, model)
    if world.ranks_per_sequence > 1:
        check_heads(load_hf_config(own), world.ranks_per_sequence, section="critic")
    lm = drop_head(make_empty_lm(own, world.device))
    if (files := WeightFiles.find(own.path, lm)) is None:
        lm = drop_head(load_causal_lm(own))
        if config.path is not None and world.is_main:
            logger.warning(
                "the critic's head starts at 0: the weights of %s are converted, or are not in "
                "safetensors files, and then a saved head is not read",
                own.path,
            )
    if own.freeze_vision_tower:
        freeze_tower(lm)
    if own.enable_gradient_checkpointing:
        enable_checkpointing(lm)
    value_model = ValueModel(lm, world, resolve_dtype(own, world.device), fsdp, files=files)
    value_model.offloads_activations = own.enable_activation_offload and world.device.type != "cpu"
    value_model.noise = find_noise(own.override_config)
    return value_model


def choose_model(config: CriticModelConfig, model: ModelConfig) -> ModelConfig:
    """Return the settings of the critic's model; those of the policy's folder apply to both."""
    update = config.model_dump()
    if config.path is None:
        update["path"] = model.path
        update["trust_remote_code"] |= model.trust_remote_code
        update["override_config"] = model.override_config | config.override_config
    return model.without_lora().model_copy(update=update)


def drop_head(lm: PreTrainedModel) -> PreTrainedModel:
    """Replace the head of a causal LM by the identity, in place: it would only need memory."""
    lm.set_output_embeddings(nn.Identity())  # pyright: ignore[reportArgumentType]
    return lm
