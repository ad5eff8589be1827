"""The tables of facts that are data files of this package, and what they say of methods.

What an estimator or a loss of the user reads is not known: it is in no table.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.section import Section


@cache
def load_table(file: Path) -> Any:
    """Read a YAML file of this package, once in a process."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is 10 times as fast
    return yaml.load(file.read_text(encoding="utf-8"), loader)


class EstimatorFacts(Section):
    """What a bundled advantage estimator reads; `methods.yaml` explains the fields."""

    reads: frozenset[str] = frozenset()
    compares_groups: bool = False
    rewards: Literal["tokens", "sum", "turns"] = "tokens"
    needs_critic: bool = False
    needs_squares: bool = False


class LossFacts(Section):
    """What a bundled policy loss reads; `methods.yaml` explains the fields."""

    reads: frozenset[str] = frozenset()
    aggregation: str | None = None


class MethodFacts(Section):
    """The facts about all bundled methods, by the names that run files use."""

    estimators: dict[str, EstimatorFacts]
    losses: dict[str, LossFacts]


@cache
def method_facts() -> MethodFacts:
    """Return the facts of `methods.yaml`."""
    return MethodFacts.model_validate(load_table(Path(__file__).with_name("methods.yaml")))


def estimator_facts(config: RunConfig) -> EstimatorFacts | None:
    """Return the facts about the run's estimator; None for an estimator of the user."""
    return method_facts().estimators.get(config.algorithm.adv_estimator)


def has_no_critic(config: RunConfig) -> bool:
    """Whether the run trains no critic, because its estimator is known to read no values."""
    return (facts := estimator_facts(config)) is not None and not facts.needs_critic


def chosen_loss(config: RunConfig) -> str:
    """Return the name of the loss that trains; `bypass_mode` has a loss of its own."""
    bypasses = config.algorithm.rollout_correction.effective.bypass_mode
    return "bypass_mode" if bypasses else config.actor.policy_loss.loss_mode


def is_gdpo(config: RunConfig) -> bool:
    """Whether the estimator compares single rewards of the scorer, not their sum."""
    return config.algorithm.adv_estimator in ("gdpo", "gdpo_verl")
