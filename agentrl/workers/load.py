"""Loading of Hugging Face models: configuration, weights, dtype."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.tied_head import is_tied
from agentrl.engines.vision import check_vision, has_vision
from agentrl.errors import ConfigError
from agentrl.media.processor import MediaProcessor
from agentrl.workers.attention import find_noise
from agentrl.workers.base_files import BaseFiles
from agentrl.workers.distributed import World
from agentrl.workers.lora import inject_adapters
from agentrl.workers.model import PolicyModel
from agentrl.workers.sequence_parallel import check_heads
from agentrl.workers.vision_tower import freeze_tower
from agentrl.workers.weight_files import WeightFiles, init_buffers, stand_in_weights

logger = logging.getLogger(__name__)


def load_policy(
    config: ModelConfig,
    world: World,
    fsdp: FsdpConfig,
    *,
    seed: int = 0,
    processor: MediaProcessor | None = None,
) -> PolicyModel:
    """Load a model folder as a sharded policy. A collective.

    Each rank reads its slices of safetensors files. If transformers converts the weights, or the
    files have another format, every rank reads the whole model and keeps its shard.

    Args:
        config: The model, and its adapters.
        world: The ranks that shard it.
        fsdp: Settings of the sharding.
        seed: Seed of new adapters.
        processor: That of a vision-language model. A picture is then computed by the model's own
            code too, and the results are compared; None: nothing is compared.

    Raises:
        MissingExtraError: for LoRA without peft.
        ConfigError: if there is no such model, its weights are incomplete, `override_config` has a
            key that it does not have, it cannot be trained packed or with pictures, its adapters do
            not fit, or the ranks that compute a sequence together cannot divide its heads.
    """
    hf_config = load_hf_config(config)
    if world.ranks_per_sequence > 1:
        check_heads(hf_config, world.ranks_per_sequence)
    stored = hf_config.dtype
    lm = make_empty_lm(config, world.device)
    if (files := WeightFiles.find(config.path, lm)) is not None:
        stored = files.dtype()
    else:
        lm = load_causal_lm(config)
        if not world.is_alone and world.is_main:
            logger.info("every rank reads all weights of %s, which are converted", config.path)
    base = BaseFiles.read(config.path, lm)
    if processor is not None:
        with stand_in_weights(lm, world.device, torch.float32):
            check_vision(lm, processor)
    if config.freeze_vision_tower:
        freeze_tower(lm)
    adapters = inject_adapters(lm, config, seed=seed)
    if config.enable_gradient_checkpointing:
        enable_checkpointing(lm)
    policy = PolicyModel(
        lm,
        world,
        resolve_dtype(config, world.device),
        fsdp,
        files=files,
        adapters=adapters,
        stored_dtype=stored if isinstance(stored, torch.dtype) else None,
    )
    policy.base = base
    policy.offloads_activations = config.enable_activation_offload and world.device.type != "cpu"
    policy.noise = find_noise(config.override_config)
    return policy


def enable_checkpointing(lm: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass.

    The library does so only in training mode, which has dropout (see `PackedModel.train`).

    Raises:
        ConfigError: if the model has no layers of the library's kind.
    """
    layers = [one for one in lm.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"the layers of {type(lm).__name__} cannot be computed again",
            key="model.enable_gradient_checkpointing",
            expected="false",
        )
    for layer in layers:
        layer.forward = partial(_run_again, layer.forward)


def _run_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


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
    refuse_other_media(loaded, config.path)
    override_config(loaded, config.override_config)
    return loaded


def refuse_other_media(loaded: PretrainedConfig, path: str) -> None:
    """Refuse a model with parts that are neither a language model nor a vision tower.

    Raises:
        ConfigError: with the model's type.
    """
    is_text = loaded.get_text_config() is loaded
    has_audio = any(name.startswith("audio_") for name in loaded.sub_configs)
    if is_text or (has_vision(loaded) and not has_audio):
        return
    raise ConfigError(
        f"the model at {path} is a {loaded.model_type}, which reads "
        f"{'audio' if has_audio else 'other media than pictures'}",
        key="model.path",
        expected="a causal language model of text, or of text and pictures",
    )


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a language model with its head.

    Args:
        config: The model's.
    """
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def make_empty_lm(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Make a Hugging Face causal LM whose weights have no memory yet.

    Raises:
        ConfigError: if there is no such model.
    """
    hf_config = load_hf_config(config)
    try:
        with torch.device("meta"):
            lm: PreTrainedModel = model_class(hf_config).from_config(
                hf_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise _no_model(config.path, error) from error
    with suppress(OSError):
        lm.generation_config = GenerationConfig.from_pretrained(config.path)
    init_buffers(lm, device)
    return lm.eval()


def load_causal_lm(config: ModelConfig) -> PreTrainedModel:
    """Load a Hugging Face causal LM in float32.

    Raises:
        ConfigError: if there is no such model, or weights are missing.
    """
    try:
        hf_config = load_hf_config(config)
        loaded: Any = model_class(hf_config).from_pretrained(
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
    if lm.config.tie_word_embeddings and not is_tied(lm):
        logger.warning(
            "config.json of %s says that the head is the embedding, and the files have two "
            "different matrices: both are used, and an export says so",
            config.path,
        )
        lm.config.tie_word_embeddings = lm.config.get_text_config().tie_word_embeddings = False
    return lm


def override_config(hf_config: PretrainedConfig, overrides: dict[str, Any]) -> None:
    """Replace keys of a Hugging Face configuration.

    In a model with a vision tower, a key that only the language part has is replaced there, and a
    part (`vision_config`) is overridden by a mapping of its keys.

    Raises:
        ConfigError: for a key that the configuration does not have.
    """
    for key, value in overrides.items():
        owner = hf_config if hasattr(hf_config, key) else hf_config.get_text_config()
        if not hasattr(owner, key):
            raise ConfigError(
                f"a {hf_config.model_type} configuration has no {key!r}",
                key=f"model.override_config.{key}",
            )
        part = getattr(owner, key)
        if not isinstance(part, PretrainedConfig):
            setattr(owner, key, value)
        elif isinstance(value, dict):
            override_config(part, cast("dict[str, Any]", value))
        else:
            raise ConfigError(
                f"{key!r} is a part of a {hf_config.model_type} configuration",
                key=f"model.override_config.{key}",
                expected="a mapping of its keys",
            )


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that `model.dtype` means on a device."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _no_model(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no model can be loaded from {path!r}: {error}",
        key="model.path",
        expected="a Hugging Face folder with config.json and safetensors, or a hub name",
    )
