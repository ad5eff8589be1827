"""Choose and build the engine that a configuration names."""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config.conflicts import longest_sequence
from agentrl.config.schema.engine import EngineName
from agentrl.config.schema.run import RunConfig
from agentrl.engines import (
    Engine,
    ScriptedEngine,
    TransformersEngine,
    TransformersEngineSettings,
)
from agentrl.engines.sglang.arguments import (
    SGLangNeeds,
    check_given,
    describe_platform,
    has_accelerator,
)
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.engines.sglang.servers.factory import SyncSource, connect
from agentrl.errors import MissingExtraError
from agentrl.plugins.environment import install_command


def choose_engine(config: RunConfig) -> EngineName:
    """Resolve `rollout.engine.name: auto` to the engine that this machine runs best."""
    name = config.rollout.engine.name
    if name != "auto":
        return name
    is_alone = config.rollout.deterministic or config.trainer.device == "cpu"
    has_sglang = not is_alone and has_accelerator() and find_spec("sglang") is not None
    return "sglang" if has_sglang else "transformers"


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that could not start, as far as its keys alone tell; nothing is started.

    Raises:
        ConfigError: for a server argument that the installed SGLang does not know, or that other
            keys decide.
        MissingExtraError: where SGLang is asked for and not installed.
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


def announce_start(config: RunConfig) -> tuple[str, ...]:
    """Say that the start of an engine takes long, where it does."""
    is_slow = choose_engine(config) == "sglang"
    return ("starting SGLang: this takes a minute",) if is_slow else ()


def describe_engine(config: RunConfig) -> str:
    """Say which engine it is, and what of it the machine decides."""
    name = choose_engine(config)
    return f"{name}, {describe_platform()}" if name == "sglang" else name


def build_engine(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Engine:
    """Build the configured engine.

    Args:
        config: Its name, settings, and the budgets that its cache must hold.
        model: The trainer's module, whose weights an embedded engine shares.
        tokenizer: For stop strings and scripted answers.
        device: Of this rank; its parameters may lie elsewhere.
        dtype: What the trainer computes in; None: the module's own.

    Raises:
        ConfigError: for settings that the engine does not know.
        EngineError: where it cannot be built.
    """
    match choose_engine(config):
        case "scripted":
            return build_scripted_engine(config, tokenizer)
        case "sglang":
            needs = _needs_in_keep(config, dtype or model.dtype, device)
            bucket_bytes = config.weight_sync.bucket_bytes
            return SGLangEngine.start(needs, tokenizer, bucket_bytes=bucket_bytes)
        case "sglang_server":
            source = SyncSource(
                settings=config.weight_sync,
                device=device,
                folder=config.trainer.default_local_dir / "weights",
            )
            needs = sglang_needs(config, dtype or model.dtype)
            return connect(config.rollout.engine.sglang_server, needs, tokenizer, source)
        case _:
            return _build_transformers_engine(config, model, tokenizer, dtype=dtype)


def build_scripted_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """Build the engine that needs no model.

    Raises:
        EngineError: where it has no answers.
    """
    return ScriptedEngine(config.rollout.engine.scripted.answers, tokenizer=tokenizer)


def sglang_needs(config: RunConfig, dtype: torch.dtype) -> SGLangNeeds:
    """Say what a run needs of SGLang, in its own keeping or as servers."""
    model = config.model
    return SGLangNeeds(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        max_model_len=_max_model_len(config),
        max_requests=config.rollout.max_concurrent_requests,
        dtype=str(dtype).removeprefix("torch."),
        seed=config.rollout.seed,
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        given=config.rollout.engine.sglang.server_arguments,
    )


def _needs_in_keep(config: RunConfig, dtype: torch.dtype, device: torch.device) -> SGLangNeeds:
    """Say what a run needs of a SGLang that is on the trainer's own device."""
    return replace(
        sglang_needs(config, dtype),
        first_device=device.index or 0,
        gives_memory=config.rollout.free_cache_engine,
    )


def _build_transformers_engine(
    config: RunConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | None,
) -> TransformersEngine:
    own = config.rollout.engine.transformers
    settings = TransformersEngineSettings(
        page_size=own.page_size,
        num_pages=own.num_pages,
        max_batch_tokens=own.max_batch_tokens,
        max_batch_size=config.rollout.max_concurrent_requests,
        max_model_len=_max_model_len(config),
        seed=config.rollout.seed,
        fit_memory=not config.rollout.deterministic,
    )
    return TransformersEngine.from_model(model, tokenizer=tokenizer, dtype=dtype, settings=settings)


def _max_model_len(config: RunConfig) -> int:
    return config.rollout.max_model_len or longest_sequence(config)
