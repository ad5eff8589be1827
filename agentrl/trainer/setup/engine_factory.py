"""Choose and build the engine that a configuration names."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config.checks import check_model_length
from agentrl.config.conflicts import longest_sequence
from agentrl.config.schema.engine import EngineName
from agentrl.config.schema.run import RunConfig
from agentrl.config.tables import has_no_critic
from agentrl.engines import (
    Engine,
    ScriptedEngine,
    TransformersEngine,
    TransformersEngineSettings,
)
from agentrl.engines.model_config import check_lengths, read_attribute
from agentrl.engines.sglang.arguments import (
    SGLangNeeds,
    check_given,
    describe_platform,
    has_accelerator,
)
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.engines.sglang.servers.factory import SyncSource, connect
from agentrl.engines.tied_head import is_tied
from agentrl.engines.transformers.support import check_embedded
from agentrl.engines.vision import has_vision
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.plugins.environment import install_command
from agentrl.workers.load import load_hf_config
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import local_tensor
from agentrl.workers.value_model import choose_model


class EngineLimits(NamedTuple):
    """What a training run knows about the size of an embedded engine's cache."""

    max_requests: int
    """Most requests of this rank at one time."""
    reserved_bytes: int = 0
    """Memory of this rank that the run allocates after the engine has started."""

    @classmethod
    def of(cls, config: RunConfig, policy: PolicyModel) -> "EngineLimits":
        """Read the limits from a configuration.

        The optimizer's two moments and the reference's own weights are allocated later, unless they
        are offloaded to the host. A validation batch without a size may have any number of rows.
        """
        world, rollout, data = policy.world, config.rollout, config.data
        batches = [config.prompts_per_rollout * rollout.n]
        if data.val_files:
            val_rows = data.val_batch_size or rollout.max_concurrent_requests * world.dp_size
            batches.append(val_rows * rollout.val_kwargs.n)
        weights = [local_tensor(weight) for weight in policy.lm.parameters()]
        trained = [local_tensor(weight) for _, weight in policy.trained_weights()]
        reserved_bytes = 0
        fsdp = config.actor.fsdp_config
        if not fsdp.offload_policy:
            if not fsdp.optimizer_offload:
                reserved_bytes += 2 * sum(part.numel() * torch.float32.itemsize for part in trained)
            has_reference = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
            is_own = policy.adapters is None or config.ref.path is not None
            if has_reference and is_own and not fsdp.param_offload:
                reserved_bytes += sum(part.nbytes for part in weights)
        return cls(
            max_requests=min(rollout.max_concurrent_requests, -(-max(batches) // world.dp_size)),
            reserved_bytes=reserved_bytes,
        )


def choose_engine(config: RunConfig) -> EngineName:
    """Resolve `rollout.engine.name: auto` to the best engine for this machine."""
    name = config.rollout.engine.name
    if name != "auto":
        return name
    is_alone = config.rollout.deterministic or config.trainer.device == "cpu"
    has_sglang = not is_alone and has_accelerator() and find_spec("sglang") is not None
    return "sglang" if has_sglang else "transformers"


def check_model_config(
    config: RunConfig, found: PretrainedConfig, *, file: Path | None = None
) -> None:
    """Check the configurations of the run's models against the budgets; read no weights.

    Raises:
        ConfigError: if they do not fit.
    """
    positions = read_attribute(found, "max_position_embeddings", sys.maxsize)
    check_model_length(config, positions, file=file)
    longest = max(longest_sequence(config), config.rollout.max_model_len or 0)
    models = {"model.path": found}
    if not has_no_critic(config) and config.critic.model.path is not None:
        models["critic.model.path"] = load_hf_config(
            choose_model(config.critic.model, config.model)
        )
    uses_reference = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if uses_reference and config.ref.path is not None:
        own = config.model.model_copy(update={"path": config.ref.path})
        models["ref.path"] = load_hf_config(own)
    for key, one in models.items():
        lengths = "data.max_prompt_length + data.max_response_length and rollout.max_model_len"
        check_lengths(one, longest, key=key, lengths=lengths)


def check_sampled(config: RunConfig, found: PretrainedConfig) -> None:
    """Refuse a model that the chosen engine cannot run; read no weights.

    Raises:
        ConfigError: with the reason, and the engine that can.
    """
    if choose_engine(config) == "transformers":
        check_embedded(found)


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that cannot start, judged by its keys; start nothing.

    Raises:
        ConfigError: for a server argument that the installed SGLang does not know, or that other
            keys set.
        MissingExtraError: if SGLang is required and not installed.
    """
    if choose_engine(config) != "sglang":
        return
    if find_spec("sglang") is None:
        key = "rollout.engine.name"
        raise MissingExtraError(
            f"{key}: asks for SGLang, which is not installed",
            key=key,
            install=install_command("sglang"),
        )
    check_given(config.rollout.engine.sglang.server_arguments)


def check_offload(config: RunConfig, policy: PolicyModel) -> None:
    """Refuse `param_offload` if the embedded engine computes on the policy's own weights.

    Raises:
        ConfigError: with the remedies.
    """
    is_whole = policy.world.is_alone or config.actor.fsdp_config.fsdp_size == 1
    is_shared = is_whole and policy.compute_dtype == torch.float32
    if policy.offload is not None and is_shared and choose_engine(config) == "transformers":
        raise ConfigError(
            "the embedded engine computes on the policy's own weights during the rollout",
            key="actor.fsdp_config.param_offload",
            expected="false, or model.dtype=bfloat16, or another engine",
        )


def announce_start(config: RunConfig) -> tuple[str, ...]:
    """Return a line that announces a start which takes long, or no line."""
    is_slow = choose_engine(config) == "sglang"
    return ("starting SGLang: this takes a minute",) if is_slow else ()


def describe_engine(config: RunConfig) -> str:
    """Describe the engine, and its settings that depend on the machine."""
    name = choose_engine(config)
    return f"{name}, {describe_platform()}" if name == "sglang" else name


def build_engine(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    limits: EngineLimits | None = None,
    servers: ServerDirectory | None = None,
) -> Engine:
    """Build the configured engine.

    Args:
        config: The engine's name and settings, and the budgets that its cache must hold.
        model: The trainer's module; an embedded engine shares its weights.
        tokenizer: For stop strings and scripted answers.
        device: The device of this rank; the model's parameters may be on another one.
        dtype: The dtype that the trainer computes in; None for the module's own.
        limits: Of an embedded engine; None: as many requests as the configuration allows, and no
            memory for others.
        servers: The SGLang servers of the run's cluster; None: those at configured addresses.

    Raises:
        ConfigError: for settings that the engine does not know.
        EngineError: if the engine cannot be built.
    """
    name = choose_engine(config)
    if name.startswith("sglang") and not is_tied(model):
        _check_head(config)
    match name:
        case "scripted":
            return build_scripted_engine(config, tokenizer)
        case "sglang":
            needs = replace(
                sglang_needs(config, dtype or model.dtype),
                first_device=device.index or 0,
                gives_memory=config.rollout.free_cache_engine,
            )
            bucket_bytes = config.weight_sync.bucket_bytes
            return SGLangEngine.start(needs, tokenizer, bucket_bytes=bucket_bytes)
        case "sglang_server":
            source = SyncSource(
                settings=config.weight_sync,
                device=device,
                folder=config.trainer.default_local_dir / "weights",
            )
            needs = sglang_needs(config, dtype or model.dtype)
            shares_devices = servers is not None and servers.shares_devices
            if shares_devices:
                needs = replace(needs, gives_memory=config.rollout.free_cache_engine)
            return connect(config.rollout.engine.sglang_server, needs, tokenizer, source, servers)
        case _:
            limits = limits or EngineLimits(max_requests=config.rollout.max_concurrent_requests)
            settings = _embedded_settings(config, limits)
            return TransformersEngine.from_model(
                model, tokenizer=tokenizer, dtype=dtype, device=device, settings=settings
            )


def _check_head(config: RunConfig) -> None:
    """Refuse a configuration by which SGLang would not read the head of the files."""
    if getattr(load_hf_config(config.model), "tie_word_embeddings", False):
        raise ConfigError(
            f"config.json of {config.model.path} says that the head is the embedding, and the "
            "files have two different matrices, of which SGLang would use one",
            key="model.path",
            expected="rollout.engine.name: transformers; or, if SGLang's class of the model has a "
            "head, model.override_config: {tie_word_embeddings: false}",
        )


def _embedded_settings(config: RunConfig, limits: EngineLimits) -> TransformersEngineSettings:
    own = config.rollout.engine.transformers
    return TransformersEngineSettings(
        page_size=own.page_size,
        num_pages=own.num_pages,
        max_batch_tokens=own.max_batch_tokens,
        max_batch_size=limits.max_requests,
        max_model_len=_max_model_len(config),
        seed=config.rollout.seed,
        fit_memory=not config.rollout.deterministic,
        reserved_bytes=limits.reserved_bytes,
    )


def build_scripted_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """Build the scripted engine, which needs no model.

    Raises:
        EngineError: if it has no answers.
    """
    return ScriptedEngine(config.rollout.engine.scripted.answers, tokenizer=tokenizer)


def sglang_needs(config: RunConfig, dtype: torch.dtype) -> SGLangNeeds:
    """Return a run's requirements on SGLang, in-process or as servers."""
    model, hf_config = config.model, load_hf_config(config.model)
    return SGLangNeeds(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        max_model_len=_max_model_len(config),
        max_requests=config.rollout.max_concurrent_requests,
        dtype=str(dtype).removeprefix("torch."),
        seed=config.rollout.seed,
        trust_remote_code=model.trust_remote_code,
        override_config=place_overrides(hf_config, model.override_config),
        has_tower=has_vision(hf_config),
        given=config.rollout.engine.sglang.server_arguments,
    )


def place_overrides(hf_config: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put the keys of the language part where the trainer has them; SGLang takes them as they are.

    Args:
        hf_config: With the overrides.
        overrides: `model.override_config`.
    """
    own = {key: value for key, value in overrides.items() if hasattr(hf_config, key)}
    inner = {key: value for key, value in overrides.items() if key not in own}
    return own | ({"text_config": {**inner, **own.get("text_config", {})}} if inner else {})


def _max_model_len(config: RunConfig) -> int:
    return config.rollout.max_model_len or longest_sequence(config)
