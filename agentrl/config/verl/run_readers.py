"""Readers of the values of data, rewards, credit and loop; see `agentrl.config.verl.mapping`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from agentrl.config.schema.run import TrackerName, TrainerConfig
from agentrl.config.tables import method_facts
from agentrl.config.verl.mapping import Ignored, KeyMapping, Mapped, Tree, as_list, integer
from agentrl.config.verl.policy_readers import prompts_per_step
from agentrl.config.verl.rollout_readers import has_turns
from agentrl.errors import ConfigError


def train_files(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take one file or several; report odd rows as verl does, unless the user refuses them."""
    if not value:
        if tree.value("trainer.val_only"):
            return Mapped()
        if tree.is_given("data.train_files"):
            raise ConfigError("is empty (of an unset shell variable?)", expected="a file")
        raise ConfigError("is missing: verl's default is a path of its authors", expected="a file")
    strict = {} if tree.is_given("data.strict_rows") else {"data.strict_rows": False}
    return Mapped({"data.train_files": as_list(value), **strict})


def val_files(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Name validation sets by file stem; if stems repeat, by folder and stem."""
    if value is None:
        return Mapped(note="nothing is validated: verl's default is a path of its authors")
    if isinstance(value, Mapping):
        return Mapped({"data.val_files": value})
    paths = [Path(str(file)) for file in as_list(value)]
    stems = Counter(path.stem for path in paths)
    named: dict[str, str] = {}
    for index, path in enumerate(paths):
        name = path.stem if stems[path.stem] == 1 else f"{path.parent.name}_{path.stem}"
        named[name if name not in named else f"{name}_{index}"] = str(path)
    note = "each file is a validation set of its own; verl pools them" if len(paths) > 1 else ""
    return Mapped({"data.val_files": named}, note)


def train_batch_size(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the prompts of a training step: all that are sampled, unless groups are filtered."""
    prompts = prompts_per_step(tree)
    if prompts == integer(value):
        return Mapped({"data.train_batch_size": value})
    note = (
        f"data.gen_batch_size prompts ({prompts}): without algorithm.filter_groups verl trains on "
        "all that it samples"
    )
    return Mapped({"data.train_batch_size": prompts}, note)


def gen_batch_size(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the prompts of one generation batch, if groups are filtered."""
    if not tree.value("algorithm.filter_groups.enable") or value is None:
        return Mapped(part_of="data.train_batch_size")
    return Mapped({"data.gen_batch_size": value})


def truncation(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the side at which long prompts are cut; verl cuts only prompts of single turns."""
    has_tools = tree.value("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    note = "prompts are cut here; verl's rollouts of several turns cut none"
    return Mapped({"data.truncation": value}, note if value != "error" and has_tools else "")


def max_samples(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take a number of rows; -1 means all of them."""
    if value is None or integer(value) < 0:
        return Mapped({row.ours[0]: None})
    note = "the first rows of the files, not a random choice" if tree.value("data.shuffle") else ""
    return Mapped({row.ours[0]: value}, note)


def seed(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the seed of the order of the rows."""
    if value is None:
        return Mapped()
    note = "the order differs from verl's for the same seed" if tree.value("data.shuffle") else ""
    return Mapped({row.ours[0]: value}, note)


def custom_class(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take a class of the dataset, or of a sampler that orders its rows."""
    if value is None:
        return Mapped()
    is_sampler = row.ours[0] == "data.sampler"
    name = tree.value(f"data.{'sampler.class_name' if is_sampler else 'custom_cls.name'}")
    found = {"path": str(value).removeprefix("pkg://").replace("/", "."), "name": name}
    if not str(value).startswith("pkg://"):
        found["path"] = value
    note = "it returns rows (dicts); agentrl renders the prompts"
    return Mapped({row.ours[0]: found}, "" if is_sampler else note)


# Rewards.


_MANAGERS = ("naive", "batch", "prime", "dapo")
"""The bundled reward managers."""


def custom_reward(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take a scorer of the user, with its name and arguments from the same section."""
    if value is None:
        return Mapped()
    section = row.name.removesuffix(".path")
    scorer = {"path": value, "name": tree.value(f"{section}.name") or "compute_score"}
    if kwargs := tree.value(f"{section}.reward_kwargs"):
        scorer["reward_kwargs"] = kwargs
    note = (
        "solution_str is the policy's last message; in verl it is the whole conversation, which is "
        'in extra_info["messages"] here'
    )
    return Mapped({"reward.custom_reward_function": scorer}, note if has_turns(tree) else "")


def reward_kwargs(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the arguments of a reward manager; those of verl's `dapo` are its overlong buffer."""
    given = _mapping(value)
    if _manager(tree) not in _MANAGERS:
        return Mapped({"reward.manager_kwargs": given} if given else {})
    buffer, longest = _mapping(given.pop("overlong_buffer_cfg", None)), given.pop("max_resp_len", 0)
    rest = {"reward.manager_kwargs": given} if given else {}
    budget = tree.value("data.max_response_length")
    if buffer.get("enable") and longest != budget:
        raise ConfigError(
            f"max_resp_len is {longest}, and data.max_response_length {budget}: agentrl has one "
            "key for both",
            expected=f"max_resp_len={budget}",
        )
    kept = [name for name in ("enable", "len", "penalty_factor") if name in buffer]
    note = "only tokens that the policy sampled count, not those of observations"
    buffers = {f"reward.overlong_buffer.{name}": buffer[name] for name in kept}
    return Mapped({**buffers, **rest}, note if buffer.get("enable") else "")


def shaping_switch(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take whether rewards of tokens, or of the trajectory, count; null and true change nothing."""
    return Mapped(dict.fromkeys(row.ours, 0.0) if value is False else {})


def shaping(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take a bonus or a penalty, if its section is not switched off."""
    switch = f"{row.name.rpartition('.')[0]}.enable"
    if tree.value(switch) is False:
        return Ignored(f"{switch} is false")
    return Mapped({row.ours[0]: value})


def launch_async(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take whether scoring starts early; verl's default is taken only for the manager `batch`."""
    if tree.is_chosen(row.name):
        return Mapped({"reward.launch_reward_fn_async": value})
    if (manager := _manager(tree)) in _MANAGERS and manager != "batch":
        return Mapped()
    note = f"the manager {manager} gets the whole batch in one call, as in verl"
    return Mapped({"reward.launch_reward_fn_async": False}, note)


def sandbox_url(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the address of the service that runs code."""
    if value is None:
        return Mapped()
    found = {"reward.sandbox.provider": "sandbox_fusion", "reward.sandbox.url": value}
    scorers = ("custom_reward_function.path", "reward.custom_reward_function.path")
    if any(map(tree.value, scorers)):
        return Mapped(found)
    note = (
        "code is scored 1 if every test passes, else 0; verl gives the share of the first ten that "
        "pass (reward.functions: [{name: code, reward_kwargs: {continuous: true}}] gives a share)"
    )
    return Mapped(found, note)


def of_sandbox(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take a limit of the service that runs code, if there is one."""
    url = f"{row.name.rpartition('.')[0]}.url"
    if tree.value(url) is None:
        return Ignored(f"{url} is null")
    unit = 1024**2 if row.name.endswith("_mb") else 1
    return Mapped({row.ours[0]: integer(value, row.name) * unit})


def _manager(tree: Tree) -> str:
    named = tree.value("reward.reward_manager.name") or tree.value("reward_model.reward_manager")
    return str(named or "naive")


def _mapping(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"is {value!r}", expected="a mapping of keys to values")
    found = cast("Mapping[Any, Any]", value or {})
    return {str(name): inner for name, inner in found.items()}


# Credit.


_GROUPS_OF_ONE = {
    "grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline",
    "optimal_token_baseline", "tir_optimal_token_baseline",
}  # fmt: skip
"""Estimators that in verl train a group of one on its own reward, and here on nothing."""


def adv_estimator(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take an estimator by name; for groups of one, the variant that does what verl does."""
    name = _estimator(tree)
    notes = {
        "optimal_token_baseline": "the tokens of a group are compared by their index among the "
        "trained tokens; optimal_token_baseline_verl compares them by position in the response"
    }
    if name.removesuffix("_verl") in _GROUPS_OF_ONE and name.endswith("_verl") and name != value:
        notes[name] = "rollout.n is 1: as in verl, a group of one trains on its own reward"
    return Mapped({"algorithm.adv_estimator": name}, notes.get(name, ""))


def _estimator(tree: Tree) -> str:
    """Return agentrl's name of the chosen estimator."""
    name = str(tree.value("algorithm.adv_estimator"))
    if name != "rloo_vectorized":  # in a group of one it gives 0, and rloo does not
        name = name.removesuffix("_vectorized")
    is_alone = name in _GROUPS_OF_ONE and tree.value("actor_rollout_ref.rollout.n") == 1
    return f"{name}_verl" if is_alone else name


def kl_in_reward(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Subtract the KL from the rewards, except in groups of equal scores."""
    note = "groups of equal scores train on nothing; verl trains them on the KL"
    is_other = value and _compares_groups(tree)
    return Mapped({"algorithm.use_kl_in_reward": bool(value)}, note if is_other else "")


def _compares_groups(tree: Tree) -> bool:
    """Whether the estimator that is read compares the samples of a group."""
    name = _estimator(tree)
    return name in (found := method_facts().estimators) and found[name].compares_groups


_FILTER = "algorithm.filter_groups"


def filter_groups(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take dynamic sampling."""
    note = "data.gen_batch_size prompts are sampled at a time until a batch is full"
    return Mapped({"algorithm.filter_groups.enable": bool(value)}, note if value else "")


def filter_metric(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the metric by which groups are filtered."""
    if value is None:
        return Mapped()
    changed = value in ("score", "seq_final_reward") and tree.value(f"{_FILTER}.enable")
    note = "the combined reward, before a KL is subtracted" if changed else ""
    return Mapped({"algorithm.filter_groups.metric": value}, note)


def max_num_gen_batches(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the limit of batches for one step; in verl, 0 and less mean no limit."""
    bound = max(0, integer(value))
    is_open = not bound and tree.value(f"{_FILTER}.enable")
    note = "at most one epoch of the data is sampled for one step" if is_open else ""
    return Mapped({"algorithm.filter_groups.max_num_gen_batches": bound}, note)


# The rollout's correction: 0.6.1's names, and those of later versions.


CORRECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""0.6.1's tests of rejection, and their names in later versions and in agentrl."""
_KEPT = (
    "advantages compare all samples; to compare only those that are left, as in verl, set "
    f"{CORRECTION}.advantages=kept"
)


def importance_sampling(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the level of the importance weights."""
    if value is None:
        return Mapped()
    return Mapped({f"{CORRECTION}.rollout_is": value}, _unless_recorded(tree))


def rejection(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the tests that tokens must pass, with their thresholds; a veto is one of them.

    0.6.1's bounds are of the trainer's probability over the engine's; agentrl's bounds, as those of
    later versions, are of the engine's over the trainer's.
    """
    names, thresholds = list[str](), list[Any]()
    if value is not None:
        names.append(_LEVELS.get(str(value), str(value)))
        thresholds.append(_bounds(value, tree))
    if (least := tree.value(f"{CORRECTION}.rollout_token_veto_threshold")) is not None:
        names.append("seq_max_k1")
        thresholds.append(1 / _positive(least))
    if not names:
        return Mapped()
    joined = thresholds[0] if len(thresholds) == 1 else ",".join(map(str, thresholds))
    found = {"rollout_rs": ",".join(names), "rollout_rs_threshold": joined}
    kept = _KEPT if _compares_groups(tree) else ""
    note = "; ".join(filter(None, (kept, _unless_recorded(tree))))
    return Mapped({f"{CORRECTION}.{name}": part for name, part in found.items()}, note)


def veto(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Leave the least ratio of one token, below which its sequence is rejected, to `rejection`."""
    return Mapped(part_of=f"{CORRECTION}.rollout_rs")


def policy_gradient(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the loss without a clip, which verl reads only under `bypass_mode`."""
    if not tree.value(f"{CORRECTION}.bypass_mode"):
        return Ignored("rollout_correction.bypass_mode is false")
    if tree.is_given(f"{CORRECTION}.loss_type"):
        return Mapped(part_of=f"{CORRECTION}.loss_type")
    return Mapped({f"{CORRECTION}.loss_type": "reinforce" if value else "ppo_clip"})


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


# The loop.


def loggers(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the loggers that agentrl has, and name the others.

    verl's default names wandb. It sends a run to a service, so it must be asked for.
    """
    [known] = (get_args(o) for o in get_args(TrainerConfig.model_fields["logger"].annotation))
    wanted = [str(name) for name in as_list(value)]
    missing = [name for name in wanted if name not in known]
    note = f"agentrl has no {', '.join(missing)}; metrics.jsonl has the metrics" if missing else ""
    if not tree.is_chosen(row.name):
        unasked = [name for name in wanted if name in get_args(TrackerName)]
        missing += unasked
        note = f"{', '.join(unasked)} only if the file names it"
    kept = dict.fromkeys([*(name for name in wanted if name not in missing), "jsonl"])
    return Mapped({"trainer.logger": list(kept)}, note)


def interval(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take an interval in steps; in verl, 0 and less mean "never"."""
    if integer(value) > 0:
        return Mapped({row.ours[0]: value})
    is_idle = row.ours[0] == "trainer.test_freq" and tree.value("data.val_files") is None
    return Mapped({row.ours[0]: -1}, "" if is_idle or tree.value("trainer.val_only") else row.note)


def of_profiler(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take a setting of the profiler, if steps are profiled."""
    if not any(map(tree.value, ("global_profiler.steps", "trainer.profiler.steps"))):
        return Ignored("global_profiler.steps is null")
    return Mapped({row.ours[0]: value} if value is not None else {})


def module(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Import a module at the start, as `plugins` does."""
    return Mapped({row.ours[0]: [value]} if value else {})


def resume_path(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the checkpoint to resume from, which must be one of agentrl."""
    if value is None:
        return Mapped()
    return Mapped({"trainer.resume_from_path": value}, "a checkpoint of agentrl, not of verl")


def device(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the device, if the user chose it."""
    if value == "npu":
        raise ConfigError(
            "npu: agentrl trains on NVIDIA GPUs (cuda) or on the CPU, and has no NPU backend",
            expected="cuda, or no trainer.device",
        )
    if not tree.is_chosen("trainer.device"):
        return Mapped(note="an accelerator if there is one, else the CPU")
    return Mapped({"trainer.device": value})


_BUILT_IN = {
    "ppo_trainer", "_self_", "dp_actor", "legacy_data", "dp_ref", "rollout", "hf_model",
    "dp_critic", "dp_reward_model", "rollout_correction",
}  # fmt: skip
"""Files of verl's FSDP trainer; their values are the defaults in `keys.yaml`."""


def defaults(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Accept the names of verl's own files; the content of other files is not known."""
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
    return Mapped()
