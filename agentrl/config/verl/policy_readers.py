"""Readers of the values of model and update; see `agentrl.config.verl.mapping`."""

from typing import Any, cast

from agentrl.config.tables import method_facts
from agentrl.config.verl.mapping import Ignored, KeyMapping, Mapped, Tree, count, integer
from agentrl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic"
POLICY = "actor_rollout_ref.model"

_DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32",
}  # fmt: skip


def prompts_per_step(tree: Tree) -> int:
    """Count the prompts of one training step: all that verl samples, unless it filters groups."""
    sampled = tree.value("data.gen_batch_size")
    if sampled is None or tree.value("algorithm.filter_groups.enable"):
        return count(tree, "data.train_batch_size")
    return integer(sampled, "data.gen_batch_size")


# The model.


def model_path(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the policy's folder or hub name; verl's default is a path of its authors."""
    if value is None:
        raise ConfigError(
            "is missing: verl's default is a path of its authors", expected="a model folder"
        )
    return Mapped({"model.path": value})


def trust_remote_code(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Trust the model's code if verl trusts it for the model or for the tokenizer."""
    return Mapped({"model.trust_remote_code": bool(value or tree.value("data.trust_remote_code"))})


def override_config(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take keys of the model's configuration, except the attention implementation."""
    if not isinstance(value, dict | None):
        raise ConfigError(f"{value!r} is no mapping", expected="keys of the model's configuration")
    given = cast("dict[str, Any]", value or {})
    nested = cast("dict[str, Any]", given.get("model_config") or {})
    flat = {k: v for k, v in {**given, **nested}.items() if k != "model_config"}
    attention = flat.pop("attn_implementation", None)
    note = f"attn_implementation {attention} is left out: agentrl chooses" if attention else ""
    return Mapped({row.ours[0]: flat} if flat else {}, note)


def compute_dtype(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the compute type, if the user chose one."""
    if not tree.is_chosen(row.name):
        return Mapped(note="bfloat16 on an accelerator, as in verl, and float32 on a CPU")
    dtype = _DTYPES.get(str(value))
    if dtype is None:
        raise ConfigError(f"{value!r} is no compute type here", expected="bfloat16 or float32")
    return Mapped({"model.dtype": dtype})


def reference_model(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the reference's own folder, if it has one."""
    return Mapped({"ref.path": value} if value else {})


# The update.


def token_budget(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the tokens of a micro-batch, which verl reads only for dynamic batches."""
    if not tree.value(f"{_section(row)}.use_dynamic_bsz"):
        return Ignored("use_dynamic_bsz is false")
    return Mapped({row.ours[0]: value})


def micro_batch(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Convert rows of a micro-batch into tokens: as many as that many of the longest rows have."""
    if tree.value(f"{_section(row)}.use_dynamic_bsz"):
        return Ignored("use_dynamic_bsz is true")
    if value is None:
        return Mapped({})
    longest = count(tree, "data.max_prompt_length") + count(tree, "data.max_response_length")
    note = (
        f"{value} rows of at most {longest} tokens; rows are packed, and only memory and speed "
        "depend on it"
    )
    num_ranks = count(tree, f"{_section(row)}.ulysses_sequence_parallel_size")
    budget = -(-integer(value) * longest // num_ranks)
    return Mapped({row.ours[0]: budget}, note)


def symmetric_clip(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the clip ratio; verl does not read it if `low` and `high` have values, as by default."""
    low, high = (tree.value(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        return Ignored(f"clip_ratio_low and clip_ratio_high are set ({low} and {high})")
    return Mapped({"actor.clip_ratio": value})


def clip_side(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take one side of the clip; all defaults together equal agentrl's defaults."""
    keys = (f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    if value is None or not any(tree.is_changed(key) for key in keys):
        return Mapped()
    return Mapped({row.ours[0]: value})


_COVARIANCE = "the covariance is that of the whole mini-batch, by old_log_probs"
_LOSSES = {
    "sapo": ("sapo_verl", "as in verl, loss_agg_mode does not change it; it changes sapo"),
    "geo_mean": (
        "geo_mean_verl",
        "as in verl, loss_agg_mode does not change it, and each micro-batch adds its own mean; "
        "geo_mean does not depend on how the batch is cut",
    ),
    "clip_cov": (
        "clip_cov",
        f"{_COVARIANCE}, and the highest are clipped, not a random choice; clip_cov_verl does it "
        "as verl does",
    ),
    "kl_cov": ("kl_cov", f"{_COVARIANCE}; kl_cov_verl does it as verl does"),
}
"""By verl's name: the loss that has the same meaning here, and how it differs."""


def loss_mode(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take a loss by name; some of verl's losses have another name here."""
    name, note = _LOSSES.get(str(value), (value, ""))
    return Mapped({"actor.policy_loss.loss_mode": name}, note)


def loss_agg_mode(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take how the losses of tokens become one number."""
    note = (
        "over the whole mini-batch and all ranks; verl 0.6.1 averages the averages of micro-batches"
    )
    if value == "seq-mean-token-sum-norm":
        note = (
            "a mean over sequences; verl 0.6.1 multiplies it by the rows of a micro-batch (AdamW "
            "undoes this scale, actor.grad_clip does not)"
        )
    return Mapped({row.ours[0]: value}, note)


def loss_scale_factor(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Check the divisor of `seq-mean-token-sum-norm`; here it is the response budget."""
    mode, budget = tree.value(f"{ACTOR}.loss_agg_mode"), tree.value("data.max_response_length")
    if mode != "seq-mean-token-sum-norm":
        return Ignored(f"loss_agg_mode is {mode}")
    if value is None or value == budget:
        return Mapped()
    raise ConfigError(
        f"is {value}, and seq-mean-token-sum-norm divides by data.max_response_length, {budget}",
        expected=f"loss_scale_factor={budget}, or none",
    )


def optimizer(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take AdamW, the only optimizer that verl and agentrl share."""
    if str(value).lower() != "adamw":
        raise ConfigError(
            f"agentrl has no {value}", expected="AdamW; or, under agentrl's key, muon"
        )
    return Mapped({row.ours[0]: "adamw"})


def scheduler(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the schedule, unless the older key `warmup_style` sets it."""
    style = tree.value(f"{_section(row)}.optim.warmup_style")
    return Ignored(f"warmup_style is {style}") if style else _schedule(value, row)


def warmup_style(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the schedule under its older name."""
    return _schedule(value, row) if value else Mapped()


def _schedule(value: Any, row: KeyMapping) -> Mapped:
    note = "it falls with each optimizer step, not with each training step"
    return Mapped({row.ours[0]: value}, note if value == "cosine" else "")


def weight_decay(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the weight decay."""
    return Mapped(
        {row.ours[0]: value}, "only matrices are decayed, not norms and biases" if value else ""
    )


def warmup_steps(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Convert training steps of warm-up into optimizer steps."""
    steps = -1 if value is None else integer(value)
    return Mapped() if steps < 0 else _warmup(steps, tree, row)


def warmup_ratio(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Convert a share of the run into optimizer steps, now or when the data are read."""
    steps = tree.value(f"{_section(row)}.optim.lr_warmup_steps")
    if steps is not None and integer(steps) >= 0:
        return Ignored(f"lr_warmup_steps is {steps}")
    if not value:
        return Mapped()
    total = tree.value("trainer.total_training_steps")
    if not isinstance(value, int | float):
        raise ConfigError(f"{value!r} is no share of a run", expected="a number from 0 to 1")
    if total is None:
        note = "of the run's optimizer steps, counted when the data are read"
        return Mapped({row.ours[1]: value}, note)
    return _warmup(int(value * integer(total)), tree, row)


def _warmup(steps: int, tree: Tree, row: KeyMapping) -> Mapped:
    mini = max(1, count(tree, f"{_section(row)}.ppo_mini_batch_size"))
    each = max(1, prompts_per_step(tree) // mini) * count(tree, f"{_section(row)}.ppo_epochs")
    note = f"{steps} training steps of {each} optimizer steps; the first has a rate above 0"
    return Mapped({row.ours[0]: steps * each}, note if steps else "")


def _section(row: KeyMapping) -> str:
    """Return the section of the update that has the key: the actor's or the critic's."""
    return CRITIC if row.name.startswith(f"{CRITIC}.") else ACTOR


# The critic.


def is_trained(tree: Tree) -> bool:
    """Whether verl has a critic: only for `gae`. An estimator of the user may read values too."""
    known = method_facts().estimators.get(str(tree.value("algorithm.adv_estimator")))
    return known is None or known.needs_critic


def critic_enable(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Check that there is a critic exactly if the estimator reads values."""
    if value is not None and bool(value) != is_trained(tree):
        name = tree.value("algorithm.adv_estimator")
        reads = "reads" if is_trained(tree) else "does not read"
        raise ConfigError(
            f"is {value}, and algorithm.adv_estimator {name} {reads} values; agentrl trains a "
            "critic exactly if the estimator reads them",
            expected="null, or another estimator",
        )
    return Mapped()


def critic_warmup(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Count the steps that train only the critic: verl trains the policy in step `value` too."""
    steps = max(0, integer(value) - 1)
    return Mapped({row.ours[0]: steps}, f"{steps} steps train only the critic" if steps else "")


def critic_path(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the critic's folder; verl's default is a path of its authors."""
    return Mapped({} if value in (None, tree.value(f"{POLICY}.path")) else {row.ours[0]: value})
