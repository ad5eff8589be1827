"""Find keys without effect in a configuration (invariant "no key is ignored silently").

The rules are in `dead_keys.yaml` and `methods.yaml`. Only keys that the user set are reported: a
default without effect misleads no user.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.run import RunConfig, TrackerName
from agentrl.config.schema.section import Section
from agentrl.config.schema.training import UpdateConfig
from agentrl.config.tables import (
    chosen_loss,
    estimator_facts,
    has_no_critic,
    load_table,
    method_facts,
)

RULES = Path(__file__).with_name("dead_keys.yaml")
_BUNDLED_PATHS = "agentrl.rewards."
_PLACEMENT = (
    "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.max_restarts", "rollout.num_workers",
    "rollout.worker_timeout_s", "cluster.*",
)  # fmt: skip
"""The keys that only a run on Ray reads."""


@dataclass(frozen=True)
class KeyNote:
    """A fact about a key that a user should know before the run starts."""

    key: str
    """Dotted."""
    reason: str
    """A sentence."""

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class DeadKey(KeyNote):
    """A key that was set and has no effect."""

    def __str__(self) -> str:
        return f"{self.key} has no effect: {self.reason}"


@dataclass(frozen=True)
class _Rule:
    """Why some keys have no effect."""

    reason: str
    keys: Collection[str]
    excluded: Collection[str] = ()

    def covers(self, key: str) -> bool:
        return _is_among(key, self.keys) and not _is_among(key, self.excluded)


def find_dead_keys(config: RunConfig) -> list[DeadKey]:
    """Find the keys that the user set and that have no effect, each with one reason."""
    unread = config.reward.sandbox.find_unread().items()
    sandbox = [_Rule(f"reward.sandbox.{why}", [f"reward.sandbox.{name}"]) for name, why in unread]
    rules = [*_method_rules(config), *_general_rules(config), *sandbox]
    found: list[DeadKey] = []
    for key in set_keys(config):
        if rule := next((rule for rule in rules if rule.covers(key)), None):
            found.append(DeadKey(key, rule.reason))
    return found


def find_dead_keys_here(config: RunConfig, *, device: str, engine: str) -> list[DeadKey]:
    """Find the keys that have no effect because of what `auto` means on this machine.

    Args:
        config: The run.
        device: What `trainer.device` means.
        engine: What `rollout.engine.name` means.
    """
    chosen = config.rollout.engine.model_copy(update={"name": engine})
    here = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"device": device}),
            "rollout": config.rollout.model_copy(update={"engine": chosen}),
        }
    )
    known = {dead.key for dead in find_dead_keys(config)}
    chosen_here = {"trainer.device": device, "rollout.engine.name": engine}
    autos = [f"{key}={value}" for key, value in chosen_here.items() if _value(config, key) != value]
    return [
        DeadKey(dead.key, f"{dead.reason} (on this machine {', '.join(autos)})")
        for dead in find_dead_keys(here)
        if dead.key not in known
    ]


def find_placement_keys(config: RunConfig, reason: str) -> list[DeadKey]:
    """Find the keys of a run on Ray that were set, for a process that does not start one.

    Args:
        config: The run.
        reason: Why this process does not use Ray.
    """
    if not config.asks_for_cluster:
        return []
    known = {dead.key for dead in find_dead_keys(config)}
    return [
        DeadKey(key, reason)
        for key in set_keys(config)
        if _is_among(key, _PLACEMENT) and key not in known
    ]


def set_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """List the leaf keys that were given (not defaulted), dotted, in the schema's order."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from set_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


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


def num_mini_batches(config: RunConfig, update: UpdateConfig) -> int:
    """Count the optimizer steps of one pass of an update over a batch."""
    size = update.ppo_mini_batch_size or config.data.train_batch_size
    return max(1, config.data.train_batch_size // size)


def may_use(config: RunConfig, *names: str) -> bool:
    """Whether one of these bundled scorers may score a row."""
    reward = config.reward
    custom = reward.custom_reward_function
    paths = [function.path for function in reward.functions] + [custom.path if custom else None]
    if any(path is not None and path.startswith(_BUNDLED_PATHS) for path in paths):
        return True  # the path may lead to any of them
    if not reward.functions:
        return custom is None
    bundled = {function.name for function in reward.functions if function.path is None}
    return not bundled.isdisjoint((*names, "data_source"))


CONDITIONS: Mapping[str, Callable[[RunConfig], bool]] = {
    "has_no_tools": lambda c: not (has_tools(c) or c.rollout.agent.is_external),
    "has_external_agent": lambda c: c.rollout.agent.is_external,
    "shows_no_tools": lambda c: (
        c.rollout.agent.is_external and c.prepare.tiny_policy is None and c.prepare.sft is None
    ),
    "has_no_external_agent": lambda c: not c.rollout.agent.is_external,
    "has_idle_tools": lambda c: why_no_call(c) is not None,
    "calls_no_tool": lambda c: (
        not (has_tools(c) or c.rollout.agent.is_external) or why_no_call(c) is not None
    ),
    "runs_no_code": lambda c: not may_use(c, "code"),
    "scores_no_math": lambda c: not may_use(c, "math"),
    "has_no_tracker": lambda c: not {*get_args(TrackerName)} & {*c.trainer.logger},
    "has_no_cluster": lambda c: not c.asks_for_cluster,
    "has_bundled_loss": lambda c: chosen_loss(c) in method_facts().losses,
    "has_one_mini_batch": lambda c: num_mini_batches(c, c.actor) == 1,
    "has_one_critic_mini_batch": lambda c: num_mini_batches(c, c.critic) == 1,
    "has_no_critic": has_no_critic,
    "has_two_weight_bounds": lambda c: (
        "_" in str(c.algorithm.rollout_correction.effective.rollout_is_threshold)
    ),
    "compares_sums": lambda c: (facts := estimator_facts(c)) is not None and facts.rewards == "sum",
}
"""The conditions that `dead_keys.yaml` names."""


def _general_rules(config: RunConfig) -> Iterator[_Rule]:
    for rule in load_table(RULES):
        when, condition = rule.get("when", {}), rule.get("if")
        if all(_matches(_value(config, key), wanted) for key, wanted in when.items()) and (
            condition is None or CONDITIONS[condition](config)
        ):
            yield _Rule(rule["reason"], rule["keys"], rule.get("except", ()))


def _value(config: RunConfig, key: str) -> Any:
    """Return the value of a key; of the rollout's correction, with its preset's settings."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
        if isinstance(found, RolloutCorrectionConfig):
            found = found.effective
    return found


def _matches(value: Any, wanted: Any) -> bool:
    match wanted:
        case {"not": others}:
            return value not in others
        case {"lacks": item}:
            return item not in value
        case list():
            return value in wanted
        case _:
            return value == wanted


def _method_rules(config: RunConfig) -> Iterator[_Rule]:
    """Find the keys that only other methods read; nothing of a method of the user is known."""
    if config.trainer.val_only:
        return
    facts, loss = method_facts(), chosen_loss(config)
    estimator = config.algorithm.adv_estimator
    for section, kind, name, table in (
        ("actor", "policy loss", loss, facts.losses),
        ("algorithm", "estimator", estimator, facts.estimators),
    ):
        if name in table:
            read = {key for method in table.values() for key in method.reads}
            keys = read - table[name].reads
            yield _Rule(f"the {kind} {name} does not read it", [f"{section}.{k}" for k in keys])
    if loss in facts.losses and (mode := facts.losses[loss].aggregation):
        yield _Rule(f"{mode} is a part of the policy loss {loss}", ["actor.loss_agg_mode"])


def _is_among(key: str, keys: Collection[str]) -> bool:
    return any(key == k or (k.endswith(".*") and key.startswith(k[:-1])) for k in keys)
