"""Keys that change nothing in this configuration (no key is ignored silently), found by a table of
rules.

Only keys that the user set are reported: a default that has no effect misleads nobody.
"""

from collections.abc import Callable

from agentrl.config.dead_credit_keys import CALL_KEYS, CREDIT_KEYS, CREDIT_RULES
from agentrl.config.dead_method_keys import METHOD_RULES
from agentrl.config.dead_scoring_keys import SCORING_RULES
from agentrl.config.key_notes import DeadKey, DeadKeyRule, KeyNote, set_keys
from agentrl.config.schema.run import ActorConfig, OptimConfig, RunConfig

__all__ = [
    "DEAD_KEY_RULES",
    "DeadKey",
    "DeadKeyRule",
    "KeyNote",
    "find_dead_keys",
    "has_interaction",
    "has_tools",
    "num_mini_batches",
    "set_keys",
    "why_no_call",
]


def find_dead_keys(config: RunConfig) -> list[DeadKey]:
    """Find the keys that the user set and that change nothing, each with its reason once."""
    rules = [rule for rule in DEAD_KEY_RULES if rule.applies(config)]
    first_rule = (
        (key, next((r for r in rules if r.covers(key)), None)) for key in set_keys(config)
    )
    return [DeadKey(key, rule.reason) for key, rule in first_rule if rule]


def has_tools(config: RunConfig) -> bool:
    """Whether the run has any tool."""
    multi_turn = config.rollout.multi_turn
    return bool(multi_turn.tool_config_path or multi_turn.function_tool_path)


def why_no_call(config: RunConfig) -> str | None:
    """Name the budget under which no tool is ever called, although the run has tools."""
    multi_turn = config.rollout.multi_turn
    if not has_tools(config):
        return None
    if multi_turn.max_assistant_turns == 1:
        return "rollout.multi_turn.max_assistant_turns is 1, and no call follows the last turn"
    return "rollout.multi_turn.max_tool_calls is 0" if multi_turn.max_tool_calls == 0 else None


def has_interaction(config: RunConfig) -> bool:
    """Whether the run has a simulated user or environment."""
    return config.rollout.multi_turn.interaction_config_path is not None


def num_mini_batches(config: RunConfig) -> int:
    """Count the optimizer steps of one pass over a batch."""
    size = config.actor.ppo_mini_batch_size or config.data.train_batch_size
    return max(1, config.data.train_batch_size // size)


def _multi_turn(*leaves: str) -> tuple[str, ...]:
    return tuple(f"rollout.multi_turn.{leaf}" for leaf in leaves)


def _only_training() -> tuple[str, ...]:
    """Keys that nothing but a training step reads; how weights are sharded is no such key."""
    actor = [name for name in ActorConfig.model_fields if name != "fsdp_config"]
    return (
        *(f"actor.{name}{'.*' if name in ('optim', 'policy_loss') else ''}" for name in actor),
        *("algorithm.*", "ref.*", *CREDIT_KEYS, "reward.overlong_buffer.*"),
        *("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k"),
        *("data.train_files", "data.train_batch_size", "data.gen_batch_size"),
        *("data.train_max_samples",),
        *("data.shuffle", "data.seed", "model.enable_gradient_checkpointing"),
        *("trainer.total_training_steps", "trainer.total_epochs", "trainer.test_freq"),
        *("trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.rollout_data_dir"),
    )


def _optim_rules(
    prefix: str, optim: Callable[[RunConfig], OptimConfig | None]
) -> list[DeadKeyRule]:
    def uses(config: RunConfig, **values: str) -> bool:
        section = optim(config)
        return section is not None and all(section.__dict__[k] == v for k, v in values.items())

    return [
        DeadKeyRule(
            (f"{prefix}.muon_lr",),
            lambda c: uses(c, name="adamw"),
            f"{prefix}.name is adamw, whose learning rate is `lr`",
        ),
        DeadKeyRule(
            (f"{prefix}.lr_warmup_steps_ratio",),
            lambda c: bool((section := optim(c)) and section.lr_warmup_steps),
            f"{prefix}.lr_warmup_steps is set",
        ),
        DeadKeyRule(
            (f"{prefix}.min_lr_ratio",),
            lambda c: uses(c, lr_scheduler="constant"),
            f"{prefix}.lr_scheduler is constant, so the learning rate never falls",
        ),
    ]


DEAD_KEY_RULES: tuple[DeadKeyRule, ...] = (
    DeadKeyRule(
        _only_training(),
        lambda c: c.trainer.val_only,
        "trainer.val_only is true, so nothing is trained",
    ),
    # Data.
    DeadKeyRule(("data.seed",), lambda c: not c.data.shuffle, "data.shuffle is false"),
    DeadKeyRule(
        ("data.filter_num_workers", "data.cache_dir"),
        lambda c: not c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts is false, so no prompt is measured beforehand",
    ),
    DeadKeyRule(
        ("data.truncation",),
        # With tools a prompt may grow behind the filter: what `create` answers is appended to it.
        lambda c: c.data.filter_overlong_prompts and not has_tools(c),
        "data.filter_overlong_prompts drops every prompt that would be truncated",
    ),
    DeadKeyRule(
        ("data.val_batch_size", "data.val_max_samples", "trainer.test_freq",
         "trainer.val_before_train", "trainer.validation_data_dir", "rollout.val_kwargs.*",
         "reward.success_threshold"),
        lambda c: not c.data.val_files,
        "data.val_files is empty, so nothing is validated",
    ),
    DeadKeyRule(
        ("data.gen_batch_size",),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is false, so each step takes data.train_batch_size prompts",
    ),
    # Tools and interactions.
    DeadKeyRule(
        (*_multi_turn("max_parallel_calls", "on_tool_failure"), *CALL_KEYS),
        lambda c: why_no_call(c) is not None,
        "the budgets of the run allow no tool call",
    ),
    DeadKeyRule(
        (*_multi_turn("tool_timeout_s", "max_parallel_calls", "max_tool_calls", "format",
                      "on_malformed_call", "check_tool_arguments", "tool_schema_style",
                      "on_tool_failure", "tools_per_row"), "reward.weights.tool", *CALL_KEYS),
        lambda c: not has_tools(c),
        "the run has no tools (rollout.multi_turn.tool_config_path, function_tool_path)",
    ),
    DeadKeyRule(
        ("reward.placement",),
        lambda c: (
            c.reward.placement == "tool_call_tokens"
            and (not has_tools(c) or why_no_call(c) is not None)
        ),
        "no tool is ever called, and tool_call_tokens is last_token then",
    ),
    DeadKeyRule(
        (*_multi_turn("interaction_timeout_s", "interaction_interval", "interaction_prob",
                      "max_user_turns"), "reward.weights.interaction", "reward.interaction_bonus"),
        lambda c: not has_interaction(c),
        "the run has no interaction (rollout.multi_turn.interaction_config_path)",
    ),
    DeadKeyRule(
        _multi_turn("max_tool_response_length", "tool_response_truncate_side"),
        lambda c: not has_tools(c) and not has_interaction(c),
        "the run has neither tools nor an interaction",
    ),
    # Generation.
    DeadKeyRule(
        _multi_turn("tokenization_sanity_check_frac"),
        lambda c: c.rollout.multi_turn.tokenization_sanity_check_mode == "disable",
        "rollout.multi_turn.tokenization_sanity_check_mode is disable",
    ),
    DeadKeyRule(
        ("rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k", "rollout.val_kwargs.n"),
        lambda c: c.rollout.val_kwargs.temperature == 0,
        "rollout.val_kwargs.temperature is 0 (greedy), which leaves one answer",
    ),
    DeadKeyRule(
        ("rollout.engine.transformers.*",),
        lambda c: c.rollout.engine.name not in ("auto", "transformers"),
        "rollout.engine.name names another engine",
    ),
    DeadKeyRule(
        ("rollout.engine.sglang.*",),
        lambda c: c.rollout.engine.name in ("transformers", "scripted"),
        "rollout.engine.name names another engine",
    ),
    DeadKeyRule(
        ("rollout.engine.sglang_server.*",),
        lambda c: c.rollout.engine.name != "sglang_server",
        "rollout.engine.name names another engine",
    ),
    DeadKeyRule(
        ("rollout.free_cache_engine",),
        lambda c: (
            c.trainer.device == "cpu" or c.rollout.engine.name in ("sglang_server", "scripted")
        ),
        "engine and training have no accelerator between them",
    ),
    DeadKeyRule(
        ("weight_sync.bucket_bytes",),
        lambda c: c.rollout.engine.name in ("transformers", "scripted"),
        "rollout.engine.name names an engine that computes on the trainer's own weights",
    ),
    DeadKeyRule(
        ("weight_sync.transport", "weight_sync.folder"),
        lambda c: c.rollout.engine.name != "sglang_server",
        "rollout.engine.name is not sglang_server, whose weights alone may go several ways",
    ),
    DeadKeyRule(
        ("weight_sync.folder",),
        lambda c: c.weight_sync.transport in ("tensor", "distributed"),
        "weight_sync.transport does not go by a disk",
    ),
    DeadKeyRule(
        ("rollout.engine.scripted.*",),
        lambda c: c.rollout.engine.name != "scripted",
        "rollout.engine.name names another engine",
    ),
    DeadKeyRule(
        ("rollout.failure.max_retries",),
        lambda c: c.rollout.failure.policy != "retry",
        "rollout.failure.policy is not retry",
    ),
    DeadKeyRule(
        ("rollout.failure.max_failed_frac",),
        lambda c: c.rollout.failure.policy == "raise",
        "rollout.failure.policy is raise, so the first failure ends the run",
    ),
    # The scoring.
    *SCORING_RULES,
    # The update.
    *METHOD_RULES,
    *CREDIT_RULES,
    DeadKeyRule(
        ("actor.shuffle",),
        lambda c: num_mini_batches(c) == 1,
        "the whole batch is one mini-batch",
    ),
    *_optim_rules("actor.optim", lambda c: c.actor.optim),
    *_optim_rules("prepare.sft.optim", lambda c: c.prepare.sft and c.prepare.sft.optim),
    # The loop.
    DeadKeyRule(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps decides how long the run is",
    ),
    DeadKeyRule(
        ("trainer.max_ckpt_to_keep",),
        lambda c: c.trainer.save_freq == -1,
        "trainer.save_freq is -1, so there is one checkpoint, at the end",
    ),
    DeadKeyRule(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    DeadKeyRule(
        ("trainer.plot",),
        lambda c: "jsonl" not in c.trainer.logger,
        "the curve is drawn from metrics.jsonl, and jsonl is not in trainer.logger",
    ),
)  # fmt: skip
"""Every rule; the first that covers a key gives its reason."""
