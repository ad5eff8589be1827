"""How values of the model and the update are read."""

from typing import Any, cast

from agentrl.config.verl.mapping import Reader, Reading, Tree, Unused, count, integer
from agentrl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"

_DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32",
}  # fmt: skip


def longest_sequence(tree: Tree) -> int:
    """Count the tokens of the longest prompt with the longest response."""
    return count(tree, "data.max_prompt_length") + count(tree, "data.max_response_length")


def prompts_per_step(tree: Tree) -> int:
    """Count the prompts of one training step: without `filter_groups` all that verl samples."""
    sampled = tree.value("data.gen_batch_size")
    if sampled is None or tree.value("algorithm.filter_groups.enable"):
        return count(tree, "data.train_batch_size")
    return integer(sampled, "data.gen_batch_size")


def updates_per_step(tree: Tree) -> int:
    """Count the optimizer steps of one training step, by which our schedules count."""
    batch = prompts_per_step(tree)
    mini = max(1, count(tree, f"{ACTOR}.ppo_mini_batch_size"))
    return max(1, batch // mini) * count(tree, f"{ACTOR}.ppo_epochs")


# The model.


def model_path(value: Any, tree: Tree) -> Reading:
    """Take the policy's folder or hub name; verl's default is no one's."""
    if value is None:
        raise ConfigError(
            "is missing: verl's default is a path of its authors'", expected="a model folder"
        )
    return Reading({"model.path": value})


def trust_remote_code(value: Any, tree: Tree) -> Reading:
    """Trust the code beside the model where verl trusts it for model or tokenizer."""
    return Reading({"model.trust_remote_code": bool(value or tree.value("data.trust_remote_code"))})


def override_config(value: Any, tree: Tree) -> Reading:
    """Take replaced keys of the model's configuration; how attention is computed is no such key."""
    if not isinstance(value, dict | None):
        raise ConfigError(f"{value!r} is no mapping", expected="keys of the model's configuration")
    given = cast("dict[str, Any]", value or {})
    nested = cast("dict[str, Any]", given.get("model_config") or {})
    flat = {k: v for k, v in {**given, **nested}.items() if k != "model_config"}
    attention = flat.pop("attn_implementation", None)
    note = f"attn_implementation {attention} is left out: agentrl chooses" if attention else ""
    return Reading({"model.override_config": flat} if flat else {}, note)


def compute_dtype(value: Any, tree: Tree) -> Reading:
    """Take the type that is computed in."""
    key = f"{ACTOR}.fsdp_config.dtype"
    if not tree.is_chosen(key):
        return Reading(note="bfloat16 on an accelerator, as there, and float32 on a CPU")
    dtype = _DTYPES.get(str(value))
    if dtype is None:
        raise ConfigError(f"{value!r} is not computed in here", expected="bfloat16 or float32")
    return Reading({"model.dtype": dtype})


def reference_model(value: Any, tree: Tree) -> Reading:
    """Take the reference's own folder, where it has one."""
    return Reading({"ref.path": value} if value else {})


# The update.


def token_budget(value: Any, tree: Tree) -> Reading | Unused:
    """Take the tokens of a micro-batch, which verl reads for dynamic batches alone."""
    if not tree.value(f"{ACTOR}.use_dynamic_bsz"):
        return Unused("use_dynamic_bsz is false")
    return Reading({"actor.ppo_max_token_len_per_gpu": value})


def micro_batch(value: Any, tree: Tree) -> Reading | Unused:
    """Turn rows of a micro-batch into tokens: as many as so many of the longest rows have."""
    if tree.value(f"{ACTOR}.use_dynamic_bsz"):
        return Unused("use_dynamic_bsz is true")
    longest = longest_sequence(tree)
    if value is None:
        enough = max(longest, 16384)
        return Reading({"actor.ppo_max_token_len_per_gpu": enough} if enough > 16384 else {})
    words = f"{value} rows of at most {longest} tokens; rows are packed, and only memory and speed "
    note = f"{words}depend on it"
    return Reading({"actor.ppo_max_token_len_per_gpu": integer(value) * longest}, note)


def symmetric_clip(value: Any, tree: Tree) -> Reading | Unused:
    """Take the clip ratio, which verl's own defaults for `low` and `high` outvote."""
    low, high = (tree.value(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        return Unused(f"clip_ratio_low and clip_ratio_high are set ({low} and {high})")
    return Reading({"actor.clip_ratio": value})


def clip_side(side: str) -> Reader:
    """Take one side of the clip; its default says nothing where `clip_ratio` is not touched."""

    def read(value: Any, tree: Tree) -> Reading:
        keys = (f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
        if value is None or not any(tree.is_changed(key) for key in keys):
            return Reading()
        return Reading({f"actor.clip_ratio_{side}": value})

    return read


_COVARIANCE = "the covariance is that of the whole mini-batch, by old_log_probs"
_LOSSES = {
    "sapo": ("sapo_verl", "as there, loss_agg_mode does not reach it; sapo follows it"),
    "geo_mean": (
        "geo_mean_verl",
        "as there, loss_agg_mode does not reach it, and each micro-batch adds a mean of its own: "
        "geo_mean does not know how the batch is cut",
    ),
    "clip_cov": (
        "clip_cov",
        f"{_COVARIANCE}, and the highest are held back, not a random choice; clip_cov_verl is as "
        "there",
    ),
    "kl_cov": ("kl_cov", f"{_COVARIANCE}; kl_cov_verl is as there"),
}
"""By verl's name: the loss here whose numbers are meant, and what is to be known of it."""


def loss_mode(value: Any, tree: Tree) -> Reading:
    """Take a loss by name; those that are deaf to the aggregation are so here by another name."""
    name, note = _LOSSES.get(str(value), (value, ""))
    return Reading({"actor.policy_loss.loss_mode": name}, note)


def loss_agg_mode(value: Any, tree: Tree) -> Reading:
    """Take how the losses of tokens become one number."""
    note = "over the whole mini-batch and all ranks; verl 0.6.1 averages the averages of "
    note += "micro-batches"
    if value == "seq-mean-token-sum-norm":
        note = "a mean over sequences; verl 0.6.1's is as many times as large as a micro-batch has "
        note += "rows (AdamW scales it back, actor.grad_clip does not)"
    return Reading({"actor.loss_agg_mode": value}, note)


def loss_scale_factor(value: Any, tree: Tree) -> Reading | Unused:
    """Hold the divisor of `seq-mean-token-sum-norm` against the one that is here."""
    mode, budget = tree.value(f"{ACTOR}.loss_agg_mode"), tree.value("data.max_response_length")
    if mode != "seq-mean-token-sum-norm":
        return Unused(f"loss_agg_mode is {mode}")
    if value is None or value == budget:
        return Reading()
    raise ConfigError(
        f"is {value}, and seq-mean-token-sum-norm divides by data.max_response_length, {budget}",
        expected=f"loss_scale_factor={budget}, or none",
    )


def optimizer(value: Any, tree: Tree) -> Reading:
    """Take the one optimizer of verl's that is here."""
    if str(value).lower() != "adamw":
        raise ConfigError(f"there is no {value} here", expected="AdamW; or, in our names, muon")
    return Reading({"actor.optim.name": "adamw"})


def scheduler(value: Any, tree: Tree) -> Reading | Unused:
    """Take the schedule's form, which the older `warmup_style` outvotes."""
    style = tree.value(f"{ACTOR}.optim.warmup_style")
    return Unused(f"warmup_style is {style}") if style else _schedule(value)


def warmup_style(value: Any, tree: Tree) -> Reading:
    """Take the schedule's form under its older name."""
    return _schedule(value) if value else Reading()


def _schedule(value: Any) -> Reading:
    note = "it falls with each optimizer step, not with each training step"
    return Reading({"actor.optim.lr_scheduler": value}, note if value == "cosine" else "")


def warmup_steps(value: Any, tree: Tree) -> Reading:
    """Turn training steps of warm-up into optimizer steps."""
    steps = -1 if value is None else integer(value)
    return Reading() if steps < 0 else _warmup(steps, tree)


def warmup_ratio(value: Any, tree: Tree) -> Reading | Unused:
    """Turn a share of the run into optimizer steps, here or when the data are read."""
    steps = tree.value(f"{ACTOR}.optim.lr_warmup_steps")
    if steps is not None and integer(steps) >= 0:
        return Unused(f"lr_warmup_steps is {steps}")
    if not value:
        return Reading()
    total = tree.value("trainer.total_training_steps")
    if not isinstance(value, int | float):
        raise ConfigError(f"{value!r} is no share of a run", expected="a number from 0 to 1")
    if total is None:
        note = "of the run's optimizer steps, counted when the data are read"
        return Reading({"actor.optim.lr_warmup_steps_ratio": value}, note)
    return _warmup(int(value * integer(total)), tree)


def _warmup(steps: int, tree: Tree) -> Reading:
    each = updates_per_step(tree)
    note = f"{steps} training steps of {each} optimizer steps; the first has a rate above 0"
    return Reading({"actor.optim.lr_warmup_steps": steps * each}, note if steps else "")
