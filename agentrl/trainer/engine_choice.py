"""Choose and build the engine that a configuration names."""

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from agentrl.config.contradictions import longest_sequence
from agentrl.config.schema import RunConfig
from agentrl.engines import (
    Engine,
    ScriptedEngine,
    TransformersEngine,
    TransformersEngineSettings,
)


def choose_engine(config: RunConfig) -> str:
    """Resolve `rollout.engine.name: auto` to the engine that this machine runs best."""
    name = config.rollout.engine.name
    return "transformers" if name == "auto" else name


def build_engine(
    config: RunConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | None = None,
) -> Engine:
    """Build the configured engine.

    Args:
        config: Its name, settings, and the budgets that its cache must hold.
        model: The trainer's module, whose weights an embedded engine shares.
        tokenizer: For stop strings and scripted answers.
        dtype: What the trainer computes in.

    Raises:
        EngineError: where it cannot be built.
    """
    engine = config.rollout.engine
    if choose_engine(config) == "scripted":
        return build_scripted_engine(config, tokenizer)
    own = engine.transformers
    max_model_len = config.rollout.max_model_len or longest_sequence(config)
    settings = TransformersEngineSettings(
        page_size=own.page_size,
        num_pages=own.num_pages,
        max_batch_tokens=own.max_batch_tokens,
        max_batch_size=config.rollout.max_concurrent_requests,
        max_model_len=max_model_len,
        seed=config.rollout.seed,
        fit_memory=not config.rollout.deterministic,
    )
    return TransformersEngine.from_model(model, tokenizer=tokenizer, dtype=dtype, settings=settings)


def build_scripted_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """Build the engine that needs no model.

    Raises:
        EngineError: where it has no answers.
    """
    return ScriptedEngine(config.rollout.engine.scripted.answers, tokenizer=tokenizer)
