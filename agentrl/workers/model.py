"""The policy's module: a Hugging Face causal LM, sharded by FSDP2, that scores packed batches.

Master weights are float32; the layers compute in FSDP2's mixed precision. All uses of a sharded
weight are in `PolicyModel.forward`, so that FSDP2 gathers it first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import ConfigError
from agentrl.workers.attention import PACKED_ATTENTION, check_packable
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import HeadTransform, TokenScores, read_head_transform, score_tokens
from agentrl.workers.packing import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringParams:
    """How tokens are scored."""

    temperature: float
    """The rollout's; the logits are divided by it."""
    logits_block_bytes: int | None = None
    """Bytes of one block of logits; None: a default for the device."""
    with_sum_pi_squared: bool = False
    """Whether to sum the squared probabilities of the vocabulary too."""


class PolicyModel(nn.Module):
    """A causal LM that computes the scores of the trained tokens of a packed batch.

    Args:
        lm: The Hugging Face model, float32, on the device of the run.
        world: The ranks that shard it.
        compute_dtype: The dtype of its layers.
        fsdp: Settings of the sharding.
    """

    def __init__(
        self, lm: PreTrainedModel, world: World, compute_dtype: torch.dtype, fsdp: FsdpConfig
    ) -> None:
        super().__init__()
        check_packable(lm.config)
        self.lm = lm
        self.world = world
        self.compute_dtype = compute_dtype
        self.transform = probe_head(lm)
        lm.set_attn_implementation(PACKED_ATTENTION)
        _shard(self, fsdp)

    def forward(self, packed: PackedBatch, params: ScoringParams) -> TokenScores:
        """Score the trained tokens of a micro-batch, `[N]` each."""
        hidden = self.lm.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            attention_plan=packed.plan,
        ).last_hidden_state
        head = _head(self.lm)
        return score_tokens(
            hidden[0].index_select(0, packed.head_positions),
            head.weight,
            head.bias,
            packed.targets,
            temperature=params.temperature,
            transform=self.transform,
            block_bytes=params.logits_block_bytes,
            with_sum_pi_squared=params.with_sum_pi_squared,
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the sharded weights by Hugging Face name, tied weights once."""
        self.release_gathered()
        return self.lm.named_parameters()

    def release_gathered(self) -> None:
        """Free gathered weights, so that the modules hold the optimizer's shards again.

        A forward pass without a backward pass may leave gathered copies in the modules, which
        would be stale after the next step.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration."""
        return self.lm.config


def load_policy(config: ModelConfig, world: World, fsdp: FsdpConfig) -> PolicyModel:
    """Load a model folder as a sharded policy.

    Every rank reads the whole model and keeps its shard.

    Raises:
        ConfigError: if there is no such model, its weights are incomplete, `override_config` has a
            key that it does not have, or it cannot be trained packed.
    """
    lm = load_causal_lm(config)
    nn.Module.to(lm, world.device)
    if config.enable_gradient_checkpointing:
        enable_checkpointing(lm)
    return PolicyModel(lm, world, resolve_dtype(config, world.device), fsdp)


def enable_checkpointing(lm: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass."""
    enable = getattr(lm, "activation_checkpointing_enable", None)  # named so from 5.23 on
    (enable or lm.gradient_checkpointing_enable)({"use_reentrant": False})


def load_hf_config(config: ModelConfig) -> PretrainedConfig:
    """Load a model's configuration with the run's `override_config`, without its weights.

    Raises:
        ConfigError: if there is no such model, or `override_config` has a key that it does not
            have.
    """
    try:
        loaded = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _no_model(config.path, error) from error
    refuse_multimodal(loaded, config.path)
    override_config(loaded, config.override_config)
    return loaded


def refuse_multimodal(loaded: PretrainedConfig, path: str) -> None:
    """Refuse a multimodal model: only its language part would be trained.

    Raises:
        ConfigError: with the model's type.
    """
    if loaded.get_text_config() is not loaded:
        raise ConfigError(
            f"the model at {path} is a {loaded.model_type}, which reads images or other media; "
            "agentrl trains text models only",
            key="model.path",
            expected="a causal language model of text",
        )


def load_causal_lm(config: ModelConfig) -> PreTrainedModel:
    """Load a Hugging Face causal LM in float32.

    Raises:
        ConfigError: if there is no such model, or weights are missing.
    """
    try:
        hf_config = load_hf_config(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _no_model(config.path, error) from error
    lm, info = loaded
    missing = sorted(info.get("missing_keys") or [])
    missing += sorted(str(key) for key in info.get("mismatched_keys") or [])
    if missing:
        raise ConfigError(
            f"{config.path!r} lacks weights, which would be random: {', '.join(missing[:5])}",
            key="model.path",
            expected="a complete causal language model",
        )
    return lm


def override_config(hf_config: PretrainedConfig, overrides: dict[str, Any]) -> None:
    """Replace keys of a Hugging Face configuration.

    Raises:
        ConfigError: for a key that the configuration does not have.
    """
    for key, value in overrides.items():
        if not hasattr(hf_config, key):
            raise ConfigError(
                f"a {hf_config.model_type} configuration has no {key!r}",
                key=f"model.override_config.{key}",
            )
        setattr(hf_config, key, value)


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that `model.dtype` means on a device."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def full_tensor(shard: Tensor) -> Tensor:
    """Gather a sharded tensor; on one rank, return the shard itself, not a copy.

    A collective: every rank must call it, in the same order.
    """
    if not isinstance(shard, DTensor):
        return shard
    if shard.device_mesh.size() == 1:
        return shard.to_local()
    return shard.full_tensor()


def probe_head(lm: PreTrainedModel) -> HeadTransform:
    """Read a model's transform of its logits, and check it against the model's own logits.

    Raises:
        ConfigError: if agentrl's log-probabilities differ from the model's.
    """
    head = _head(lm)
    transform = read_head_transform(lm.config)
    ids = torch.tensor([[0, 1]], device=lm.device)
    was_training = lm.training
    with torch.no_grad():
        lm.eval()
        expected = lm(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        targets = expected.argmax(-1)
        found = score_tokens(
            hidden, head.weight, head.bias, targets, temperature=1.0, transform=transform
        )
    lm.train(was_training)
    if not torch.allclose(found.log_probs, expected.amax(-1).float(), atol=1e-3):
        raise ConfigError(
            f"{type(lm).__name__} transforms its logits in a way that agentrl does not support",
            key="model.path",
            expected="plain logits, logit_scale, logits_scaling or final_logit_softcapping",
        )
    return transform


def _no_model(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no model can be loaded from {path!r}: {error}",
        key="model.path",
        expected="a Hugging Face folder with config.json and safetensors, or a hub name",
    )


def _head(lm: PreTrainedModel) -> nn.Linear:
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"{type(lm).__name__} has no linear head", key="model.path")
    return head


def _shard(policy: PolicyModel, fsdp: FsdpConfig) -> None:
    """Shard each decoder layer, then the rest (embeddings, last norm, head) as one group."""
    low = policy.compute_dtype != torch.float32
    shared: dict[str, Any] = {
        "mesh": policy.world.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=policy.compute_dtype if low else None,
            reduce_dtype=torch.float32 if low else None,
        ),
        # A single rank gathers nothing.
        "reshard_after_forward": fsdp.reshard_after_forward and not policy.world.is_alone,
    }
    if fsdp.offload_policy:
        shared["offload_policy"] = CPUOffloadPolicy()
    layer_types = set(policy.lm._no_split_modules or [])
    for module in list(policy.lm.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, **shared)
    fully_shard(policy, **shared)
