"""How values of the data, the rewards and the loop are read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from agentrl.config.schema.run import TrainerConfig
from agentrl.config.verl.mapping import Reader, Reading, Tree, Unused, as_list, integer
from agentrl.config.verl.policy_readers import prompts_per_step
from agentrl.errors import ConfigError


def train_files(value: Any, tree: Tree) -> Reading:
    """Take one file or several."""
    if not value:
        if tree.value("trainer.val_only"):
            return Reading()
        if tree.is_given("data.train_files"):
            raise ConfigError("is empty (of an unset shell variable?)", expected="a file")
        raise ConfigError("is missing: verl's default is a path of its authors'", expected="a file")
    settings: dict[str, Any] = {"data.train_files": as_list(value)}
    if tree.is_given("data.strict_rows"):
        return Reading(settings)
    return Reading(settings | {"data.strict_rows": False})


def val_files(value: Any, tree: Tree) -> Reading:
    """Name validation sets: by stem, and by folder where stems repeat."""
    if value is None:
        return Reading(note="nothing is validated: verl's default is a path of its authors'")
    if isinstance(value, Mapping):
        return Reading({"data.val_files": value})
    files = as_list(value)
    note = "each file is a validation set of its own; verl pools them" if len(files) > 1 else ""
    return Reading({"data.val_files": _named(files)}, note)


def _named(files: Sequence[Any]) -> dict[str, str]:
    paths = [Path(str(file)) for file in files]
    stems = Counter(path.stem for path in paths)
    named: dict[str, str] = {}
    for place, path in enumerate(paths):
        name = path.stem if stems[path.stem] == 1 else f"{path.parent.name}_{path.stem}"
        named[name if name not in named else f"{name}_{place}"] = str(path)
    return named


def train_batch_size(value: Any, tree: Tree) -> Reading:
    """Take the prompts of a training step: those that are sampled, if none of them is dropped."""
    prompts = prompts_per_step(tree)
    if prompts == integer(value):
        return Reading({"data.train_batch_size": value})
    note = (
        f"data.gen_batch_size prompts ({prompts}): without algorithm.filter_groups verl trains on "
        "all that it samples"
    )
    return Reading({"data.train_batch_size": prompts}, note)


def gen_batch_size(value: Any, tree: Tree) -> Reading:
    """Take the prompts of one generation batch, if groups are dropped."""
    if not tree.value("algorithm.filter_groups.enable") or value is None:
        return Reading(part_of="data.train_batch_size")
    return Reading({"data.gen_batch_size": value})


def truncation(value: Any, tree: Tree) -> Reading:
    """Take which side of a long prompt is cut, which verl does for a single turn alone."""
    turns = "actor_rollout_ref.rollout.multi_turn"
    note = (
        "prompts are cut here; verl's rollouts of several turns cut none"
        if value != "error" and tree.value(f"{turns}.tool_config_path")
        else ""
    )
    return Reading({"data.truncation": value}, note)


def max_samples(ours: str) -> Reader:
    """Take a number of rows; -1 is all of them."""

    def read(value: Any, tree: Tree) -> Reading:
        if value is None or integer(value) < 0:
            return Reading({ours: None})
        return Reading({ours: value}, "the first rows of the files, not a random choice")

    return read


def custom_class(value: Any, tree: Tree) -> Reading:
    """Take a dataset class; its signature is another one."""
    if value is None:
        return Reading()
    place = {"path": value, "name": tree.value("data.custom_cls.name")}
    return Reading({"data.custom_cls": place}, "it gives rows (dicts); agentrl renders the prompts")


# Rewards.


def custom_reward(section: str) -> Reader:
    """Take a scorer of the user's own, from the section that holds its path."""

    def read(value: Any, tree: Tree) -> Reading:
        if value is None:
            return Reading()
        scorer = {"path": value, "name": tree.value(f"{section}.name") or "compute_score"}
        kwargs = tree.value(f"{section}.reward_kwargs")
        whole = scorer | ({"reward_kwargs": kwargs} if kwargs else {})
        note = (
            "solution_str is the policy's last message; the whole conversation, which it is "
            'there, stands in extra_info["messages"]'
        )
        return Reading({"reward.custom_reward_function": whole}, note)

    return read


def reward_kwargs(value: Any, tree: Tree) -> Reading:
    """Take the arguments of verl's reward manager `dapo`: a buffer before the longest answer."""
    given = _mapping(value)
    buffer, longest = _mapping(given.pop("overlong_buffer_cfg", None)), given.pop("max_resp_len", 0)
    if given:
        raise ConfigError(
            f"{', '.join(given)}: reward managers take no arguments here",
            expected="overlong_buffer_cfg and max_resp_len; custom_reward_function.reward_kwargs "
            "reach the scorer",
        )
    budget = tree.value("data.max_response_length")
    if buffer.get("enable") and longest != budget:
        raise ConfigError(
            f"max_resp_len is {longest}, and data.max_response_length {budget}: here they are one",
            expected=f"max_resp_len={budget}",
        )
    kept = {name: buffer[name] for name in ("enable", "len", "penalty_factor") if name in buffer}
    note = "tokens that the policy sampled count, and not those that it was shown" if kept else ""
    return Reading({f"reward.overlong_buffer.{name}": kept[name] for name in kept}, note)


def launch_async(theirs: str) -> Reader:
    """Take whether scores begin early; but for batches, verl's default is no better than ours."""

    def read(value: Any, tree: Tree) -> Reading:
        if tree.is_chosen(theirs):
            return Reading({"reward.launch_reward_fn_async": value})
        if tree.value("reward_model.reward_manager") != "batch":
            return Reading()
        note = "the manager batch gets the whole batch in one call, as there"
        return Reading({"reward.launch_reward_fn_async": False}, note)

    return read


_CUSTOM = ("custom_reward_function", "reward.custom_reward_function")


def sandbox_url(value: Any, tree: Tree) -> Reading:
    """Take the address of the service that runs code."""
    if value is None:
        return Reading()
    found = {"reward.sandbox.provider": "sandbox_fusion", "reward.sandbox.url": value}
    if any(tree.value(f"{scorer}.path") for scorer in _CUSTOM):
        return Reading(found)
    note = (
        "code is scored 1 if every test passes, else 0; verl gives the share of the first ten that "
        "pass (reward.functions: [{name: code, reward_kwargs: {continuous: true}}] gives a share)"
    )
    return Reading(found, note)


def of_sandbox(url: str, theirs: str, ours: str, *, times: int = 1) -> Reader:
    """Take a limit of the service, where there is a service."""

    def read(value: Any, tree: Tree) -> Reading | Unused:
        if tree.value(url) is None:
            return Unused(f"{url} is null")
        return Reading({ours: integer(value, theirs) * times})

    return read


def _mapping(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"holds {value!r}", expected="a mapping of keys to values")
    found = cast("Mapping[Any, Any]", value or {})
    return {str(name): inner for name, inner in found.items()}


# Credit.


_GROUPS_OF_ONE = {
    "grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline",
    "optimal_token_baseline", "tir_optimal_token_baseline",
}  # fmt: skip
"""Estimators that train a group of one on its own reward there, and on nothing here."""
_TOKENS_BY_NUMBER = (
    "tokens of a group are compared by their number among the trained ones; "
    "optimal_token_baseline_verl compares them by place"
)


def adv_estimator(value: Any, tree: Tree) -> Reading:
    """Take an estimator by name; groups of one are what they are there."""
    if value == "gae":
        whose = "" if tree.is_changed("algorithm.adv_estimator") else " (verl's default)"
        raise ConfigError(
            f"is gae{whose}, which needs a critic: there is none here yet",
            expected="an estimator without one, such as algorithm.adv_estimator=grpo",
        )
    name = str(value)
    if name != "rloo_vectorized":  # which is 0 in a group of one, and rloo is not
        name = name.removesuffix("_vectorized")
    if name in _GROUPS_OF_ONE and tree.value("actor_rollout_ref.rollout.n") == 1:
        note = "rollout.n is 1: as there, a group of one trains on its own reward"
        return Reading({"algorithm.adv_estimator": f"{name}_verl"}, note)
    note = _TOKENS_BY_NUMBER if name == "optimal_token_baseline" else ""
    return Reading({"algorithm.adv_estimator": name}, note)


def kl_in_reward(value: Any, tree: Tree) -> Reading:
    """Take the KL off the rewards, but for groups that say nothing."""
    note = "groups of equal scores train on nothing; verl trains them on the KL" if value else ""
    return Reading({"algorithm.use_kl_in_reward": bool(value)}, note)


def filter_groups(value: Any, tree: Tree) -> Reading:
    """Take dynamic sampling."""
    note = (
        "data.gen_batch_size prompts are sampled at a time until a batch is full" if value else ""
    )
    return Reading({"algorithm.filter_groups.enable": bool(value)}, note)


def filter_metric(value: Any, tree: Tree) -> Reading:
    """Take the metric by which groups are filtered."""
    if value is None:
        return Reading()
    changed = value in ("score", "seq_final_reward")
    note = "the combined reward, before a KL is taken off it" if changed else ""
    return Reading({"algorithm.filter_groups.metric": value}, note)


def max_num_gen_batches(value: Any, tree: Tree) -> Reading:
    """Take the bound on batches for one step; 0 and less are "none" there."""
    bound = max(0, integer(value))
    note = "" if bound else "at most one epoch of the data is sampled for one step"
    return Reading({"algorithm.filter_groups.max_num_gen_batches": bound}, note)


# The loop.


def loggers(value: Any, tree: Tree) -> Reading:
    """Take the loggers that are here, and name the others."""
    [known] = (get_args(o) for o in get_args(TrainerConfig.model_fields["logger"].annotation))
    wanted = [str(name) for name in as_list(value)]
    here = [name for name in wanted if name in known]
    away = [name for name in wanted if name not in known]
    kept = dict.fromkeys([*here, "jsonl"])
    note = f"{', '.join(away)}: not here; metrics.jsonl has the figures" if away else ""
    return Reading({"trainer.logger": list(kept)}, note)


def interval(ours: str, *, note: str) -> Reader:
    """Take an interval in steps; 0 and less are "never" there."""

    def read(value: Any, tree: Tree) -> Reading:
        return Reading({ours: value}) if integer(value) > 0 else Reading({ours: -1}, note)

    return read


def resume_path(value: Any, tree: Tree) -> Reading:
    """Take the checkpoint to go on from; verl's own cannot be."""
    if value is None:
        return Reading()
    return Reading({"trainer.resume_from_path": value}, "a checkpoint of agentrl's, not of verl's")


def device(value: Any, tree: Tree) -> Reading:
    """Read the device; verl's default is ignored unless the file gives it."""
    if value == "npu":
        raise ConfigError(
            "npu: agentrl trains on NVIDIA GPUs (cuda) or on the CPU, and has no NPU backend",
            expected="cuda, or no trainer.device",
        )
    if not tree.is_chosen("trainer.device"):
        return Reading(note="an accelerator where there is one, else the CPU")
    return Reading({"trainer.device": value})


_BUILT_IN = {
    "ppo_trainer", "_self_", "dp_actor", "legacy_data", "dp_ref", "rollout", "hf_model",
    "dp_critic", "dp_reward_model", "rollout_correction",
}  # fmt: skip
"""Files of verl's FSDP trainer, whose values are the defaults here."""


def defaults(value: Any, tree: Tree) -> Reading:
    """Take the names of verl's own files; what another file says is not known here."""
    entries = as_list(value) if value is not None else []
    names = [
        str(name)
        for entry in entries
        for name in (_mapping(entry).values() if isinstance(entry, Mapping) else [entry])
    ]
    if others := [name for name in names if name not in _BUILT_IN]:
        raise ConfigError(
            f"names {', '.join(others)}: agentrl has the defaults of ppo_trainer built in, and "
            "reads no other file",
            expected="the keys of those files in this one; verl prints the whole tree by --cfg job",
        )
    return Reading()


CORRECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""0.6.1's tests of rejection, and the names that later versions and agentrl have for them."""
_KEPT = (
    "advantages are those of all samples; those of what is left, as there, by "
    f"{CORRECTION}.advantages=kept"
)


def importance_sampling(value: Any, tree: Tree) -> Reading:
    """Take what a weight is of."""
    if value is None:
        return Reading()
    return Reading({f"{CORRECTION}.rollout_is": value}, _unless_recorded(tree))


def rejection(value: Any, tree: Tree) -> Reading:
    """Take the tests that tokens must pass, with their thresholds; a veto is one of them.

    0.6.1's bounds are of the trainer's probability over the engine's; ours, as those of later
    versions, of the engine's over the trainer's.
    """
    names, thresholds = list[str](), list[Any]()
    if value is not None:
        names.append(_LEVELS.get(str(value), str(value)))
        thresholds.append(_bounds(value, tree))
    if (veto := tree.value(f"{CORRECTION}.rollout_token_veto_threshold")) is not None:
        names.append("seq_max_k1")
        thresholds.append(1 / _positive(veto))
    if not names:
        return Reading()
    joined = thresholds[0] if len(thresholds) == 1 else ",".join(map(str, thresholds))
    found = {"rollout_rs": ",".join(names), "rollout_rs_threshold": joined}
    note = "; ".join(filter(None, (_KEPT, _unless_recorded(tree))))
    return Reading({f"{CORRECTION}.{name}": part for name, part in found.items()}, note)


def veto(value: Any, tree: Tree) -> Reading:
    """Read the least ratio of one token, below which its sequence is rejected."""
    return Reading(part_of=f"{CORRECTION}.rollout_rs")


def policy_gradient(value: Any, tree: Tree) -> Reading | Unused:
    """Take the loss without a clip, which is read under `bypass_mode` alone."""
    if not tree.value(f"{CORRECTION}.bypass_mode"):
        return Unused("rollout_correction.bypass_mode is false")
    if tree.is_given(f"{CORRECTION}.loss_type"):
        return Reading(part_of=f"{CORRECTION}.loss_type")
    return Reading({f"{CORRECTION}.loss_type": "reinforce" if value else "ppo_clip"})


def _bounds(test: Any, tree: Tree) -> Any:
    upper = tree.value(f"{CORRECTION}.rollout_rs_threshold")
    lower = tree.value(f"{CORRECTION}.rollout_rs_threshold_lower")
    if upper is None:
        raise ConfigError("has no threshold", expected=f"{CORRECTION}.rollout_rs_threshold")
    if lower is None:
        return upper
    if test not in _LEVELS:
        raise ConfigError(
            f"{test} has a lower threshold of its own",
            expected=f"lower_upper in rollout_rs_threshold, or one of {', '.join(_LEVELS)}",
        )
    return f"{1 / _positive(upper)!r}_{1 / _positive(lower)!r}"


def _positive(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if number <= 0:
        raise ConfigError(f"{value!r} is no threshold", expected="a number above 0")
    return number


def _unless_recorded(tree: Tree) -> str:
    if tree.value("actor_rollout_ref.rollout.calculate_log_probs"):
        return ""
    return "verl corrects nothing unless rollout.calculate_log_probs is true"
