"""Recognize files of verl's trainers that agentrl does not have: one sentence for each of them.

Their keys are not looked at one by one: a list of unknown keys would hide the reason.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from agentrl.config.problems import Problem

_MEGATRON = "megatron"
_TREE = "actor_rollout_ref"


class _Trainer(NamedTuple):
    """A trainer of verl's recipes, and how its file is recognized."""

    reason: str
    expected: str
    files: tuple[str, ...]
    """Beginnings of the names of its own run files."""
    keys: tuple[str, ...]
    """Keys that no other trainer of verl's has."""


_SYNCHRONOUS = (
    "the same run on verl's synchronous trainer: a file of ppo_trainer, without `async_training` "
    "and without the section `rollout` at the root"
)
_ASYNC = "generates while it trains: agentrl generates and trains in turns"
_OWN_LOSS = "a run of ppo_trainer, with a loss or an estimator of docs/algorithms"
_TRAINERS = (
    _Trainer(
        f"is of verl's fully asynchronous trainer (recipe/fully_async_policy), which {_ASYNC}",
        _SYNCHRONOUS, ("fully_async_",), ("async_training", "rollout.total_rollout_steps"),
    ),
    _Trainer(
        f"is of verl's one-step-off trainer (recipe/one_step_off_policy), which {_ASYNC}",
        _SYNCHRONOUS, ("one_step_off_",), ("rollout.nnodes", "rollout.n_gpus_per_node"),
    ),
    _Trainer(
        "is of verl's PRIME trainer (recipe/prime), whose reward model learns: agentrl has none",
        "a run of ppo_trainer that a function scores (custom_reward_function.path)",
        ("prime_",), ("algorithm.reward_dpo_coef", "data.filter_accuracy", "data.oversample_factor",
                      "reward_model.prime_granularity"),
    ),
    _Trainer(
        "is of verl's SPIN trainer (recipe/spin), which trains on pairs: agentrl has no such loss",
        _OWN_LOSS, ("spin_",), (f"{_TREE}.actor.dpo_beta", "trainer.ref_update_freq"),
    ),
    _Trainer(
        "is of verl's SPPO trainer (recipe/sppo), whose loss agentrl does not have",
        _OWN_LOSS, ("sppo_",), ("algorithm.sppo_eta", f"{_TREE}.actor.sppo_eta"),
    ),
    _Trainer(
        "is of verl's FlowRL trainer (recipe/flowrl), whose loss agentrl does not have",
        _OWN_LOSS, ("flowrl_",), (),
    ),
)  # fmt: skip


def find_other_trainers(given: DictConfig, file: str | Path | None) -> list[Problem]:
    """Find the trainers of verl's that a tree is written for and agentrl does not have.

    Args:
        given: What file and command line say.
        file: The run file. Its name says which trainer is meant if no key does.
    """
    name = Path(file).stem if file is not None else ""
    found = list(_find_megatron(given))
    if any(_has(given, key) for key in _TRAINERS[0].keys):
        return [*found, _problem(_TRAINERS[0], given)]
    meant = (
        trainer
        for trainer in _TRAINERS
        if name.startswith(trainer.files) or any(_has(given, key) for key in trainer.keys)
    )
    return [*found, *(_problem(trainer, given) for trainer in meant)]


def _problem(trainer: _Trainer, given: DictConfig) -> Problem:
    key = next((key for key in trainer.keys if _has(given, key)), "")
    return Problem(key, trainer.reason if key else f"the file {trainer.reason}", trainer.expected)


def _find_megatron(given: DictConfig) -> Iterator[Problem]:
    reason = "is of verl's Megatron trainer: agentrl shards weights by FSDP2 alone"
    expected = (
        "the same run on verl's FSDP trainer: `defaults: [ppo_trainer, _self_]`, no `strategy: "
        "megatron` and no keys of the sections `megatron`"
    )
    files = _plain(given, "defaults")
    named = cast("list[Any]", files) if isinstance(files, list) else [files]
    if any(_MEGATRON in str(entry) for entry in named):
        yield Problem("defaults", reason, expected)
        return
    for key in (f"{_TREE}.actor.strategy", "model_engine"):
        if _plain(given, key) == _MEGATRON:
            yield Problem(key, reason, expected)
            return


def _has(given: DictConfig, key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    found = _plain(given, section) if section else OmegaConf.to_container(given, resolve=False)
    return isinstance(found, Mapping) and leaf in found


def _plain(given: DictConfig, key: str) -> Any:
    """Return what stands under a key, unresolved; None if nothing does."""
    found: Any = OmegaConf.to_container(given, resolve=False)
    for part in key.split("."):
        found = cast("Any", found).get(part) if isinstance(found, Mapping) else None
    return found
