"""verl's tree as the user gave it: recognized, and merged over verl's own defaults."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config.problems import ON_COMMAND_LINE, Problem
from agentrl.config.verl.mapping import UNSET
from agentrl.config.verl.table import find_key, is_section, load_trainers, table
from agentrl.errors import ConfigError
from agentrl.validation_messages import describe_unresolved

_SURE = ("actor_rollout_ref", "hydra", "defaults")
"""Sections that no run file of agentrl has."""
_LIKELY = ("reward_model", "custom_reward_function", "global_profiler", "ray_kwargs")
"""The same; but in an agentrl run file they are more likely a mistake."""
_OURS = ("model", "rollout", "actor", "ref", "reward", "prepare")
"""Sections that verl's tree does not have at its root."""
_OF_A_WHOLE_TREE = (
    "actor_rollout_ref.rollout.layered_summon", "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.actor.checkpoint.async_save", "data.datagen.path",
    "trainer.esi_redundant_time", "reward_model.sandbox_fusion.url",
)  # fmt: skip
"""Keys that all occur only in a tree that verl has composed; no user writes all of them."""
_TARGET = "_target_"
"""Hydra's own key: the class of a section."""


def is_verl_tree(root: Mapping[str, Any]) -> bool:
    """Whether a run file's sections are verl's.

    Raises:
        ConfigError: if they are of both trees, and none of them decides.
    """
    if any(key in root for key in _SURE):
        return True
    theirs = next((key for key in _LIKELY if key in root), None)
    ours = next((key for key in _OURS if key in root), None)
    if theirs and ours:
        raise ConfigError(
            f"{theirs!r} is a section of verl's tree, and {ours!r} one of agentrl's",
            key=theirs,
            expected="one tree: verl's has its model under actor_rollout_ref.model; agentrl's has "
            "the section `reward` for reward_model and custom_reward_function",
        )
    return theirs is not None


def refuse_mixed(file: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse keys of verl on the command line of a run file with agentrl's sections.

    Raises:
        ConfigError: with agentrl's name of the key.
    """
    if not any(key in file for key in _OURS) or any(key in file for key in _SURE):
        return
    for key in keys:
        if key.partition(".")[0] in (*_SURE, *_LIKELY):
            row = find_key(key)
            ours = ", ".join(row.ours) if row else ""
            raise ConfigError(
                f"is verl's name of a key, and the run file has agentrl's keys {ON_COMMAND_LINE}",
                key=key,
                expected=ours or "a key of docs/keys.md",
            )


def find_other_trainers(given: DictConfig, file: str | Path | None) -> list[Problem]:
    """Find out whether a tree is written for a trainer of verl that agentrl does not have.

    One sentence names the trainer. A list of its unknown keys would hide the reason.

    Args:
        given: The content of file and command line.
        file: The run file. Its name decides if no key does.
    """
    raw, name = OmegaConf.to_container(given, resolve=False), Path(file).stem if file else ""
    found = list(_find_megatron(raw))
    for trainer in load_trainers():
        key = next((key for key in trainer["keys"] if _has(raw, key)), "")
        if key or name.startswith(trainer["files"]):
            reason = trainer["reason"] if key else f"the file {trainer['reason']}"
            found.append(Problem(key, reason, trainer["expected"]))
        if key and trainer.get("has_keys_of_others"):
            break
    return found


def _find_megatron(raw: Any) -> Iterator[Problem]:
    strategy = "actor_rollout_ref.actor.strategy"
    if "megatron" in str(_look_up(raw, "defaults")):
        key = "defaults"
    else:
        chosen = (key for key in (strategy, "model_engine") if _look_up(raw, key) == "megatron")
        key = next(chosen, None)
    if key:
        yield Problem(
            key,
            "is of verl's Megatron trainer: agentrl shards weights by FSDP2 alone",
            "the same run on verl's FSDP trainer: `defaults: [ppo_trainer, _self_]`, no `strategy: "
            "megatron` and no keys of the sections `megatron`",
        )


def _has(raw: Any, key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    found = _look_up(raw, section) if section else raw
    return isinstance(found, Mapping) and leaf in found


def _look_up(raw: Any, key: str) -> Any:
    """Return the unresolved value of a key; None if it is not given."""
    for part in key.split("."):
        raw = cast("Any", raw).get(part) if isinstance(raw, Mapping) else None
    return raw


class GivenTree:
    """The keys that were given, over verl 0.6.1's defaults. Interpolations refer to both.

    Args:
        given: The content of file and command line.
        overridden: Keys that were given on the command line.
    """

    def __init__(self, given: DictConfig, overridden: Sequence[str] = ()) -> None:
        self._given = given
        self._overridden = frozenset(overridden)
        whole = cast("dict[Any, Any]", OmegaConf.to_container(given, resolve=False))
        for row in table():
            if row.default != UNSET:
                _put_default(whole, row.name.split("."), row.default)
        self._merged = OmegaConf.create(whole)

    @cached_property
    def leaves(self) -> dict[str, None]:
        """The given keys, in their order: those of the table, and unknown ones below sections.

        Raises:
            ConfigError: for an interpolation that cannot be resolved.
        """
        raw = OmegaConf.to_container(self._given, resolve=False)
        return dict.fromkeys(self._walk("", raw))

    def is_given(self, key: str) -> bool:
        """Whether the file or the command line sets a key, or one below it."""
        return key in self.leaves or any(leaf.startswith(f"{key}.") for leaf in self.leaves)

    def is_changed(self, key: str) -> bool:
        """Whether the file or the command line sets a key to another value than verl's default."""
        row = find_key(key)
        return self.is_given(key) and (row is None or self.shown(key) != row.default)

    def is_chosen(self, key: str) -> bool:
        """Whether the user chose a key's value, even if it is verl's default.

        A whole tree, as verl prints it by `--cfg job`, gives every key. There a default is no
        choice, unless the command line has it.
        """
        is_written = key in self._overridden or not self._is_whole
        return self.is_changed(key) or (self.is_given(key) and is_written)

    @cached_property
    def _is_whole(self) -> bool:
        return all(self.is_given(name) for name in _OF_A_WHOLE_TREE)

    def value(self, key: str) -> Any:
        """Resolve a key's value, as plain Python; None if it has neither value nor default.

        Raises:
            ConfigError: for an interpolation that cannot be resolved, a value that must be given.
        """
        try:
            found: Any = OmegaConf.select(self._merged, key, throw_on_missing=True)
            if isinstance(found, DictConfig | ListConfig):
                return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            message, expected = describe_unresolved(error)
            raise ConfigError(message, key=key, expected=expected) from None
        return found

    def shown(self, key: str) -> Any:
        """Return a key's value for a message: as it is written, if it cannot be resolved."""
        try:
            return self.value(key)
        except ConfigError:
            return _look_up(OmegaConf.to_container(self._given, resolve=False), key)

    def _walk(self, key: str, node: Any) -> Iterator[str]:
        row = find_key(key) if key else None
        if row is not None and row.name == key:
            yield key
        elif isinstance(node, Mapping) and node:
            for name, inner in cast("Mapping[Any, Any]", node).items():
                if name != _TARGET:
                    yield from self._walk(f"{key}.{name}".removeprefix("."), inner)
        elif isinstance(node, str) and "${" in node and is_section(key):
            yield from self._walk(key, self.value(key))
        elif not is_section(key) or node not in (None, {}):
            yield key


def _put_default(whole: dict[Any, Any], path: list[str], default: Any) -> None:
    """Put a default where nothing was given; leave a section that is no mapping as it is."""
    *sections, leaf = path
    for section in sections:
        if whole.get(section) is None:
            whole[section] = {}
        if not isinstance(whole[section], dict):
            return
        whole = cast("dict[Any, Any]", whole[section])
    whole.setdefault(leaf, default)
