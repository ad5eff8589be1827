"""verl's tree as it was given: recognised, and laid over verl's own defaults."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config.verl.mapping import UNSET
from agentrl.config.verl.table import TABLE, find_key, is_section
from agentrl.errors import ConfigError
from agentrl.validation_messages import unresolved

_SURE = ("actor_rollout_ref", "hydra", "defaults")
"""Sections that no run file of ours has."""
_LIKELY = ("reward_model", "custom_reward_function", "global_profiler", "ray_kwargs")
"""The same; but a run file of ours with one of them is more likely a slip."""
_OURS = ("model", "rollout", "actor", "ref", "reward", "prepare")
"""Sections that verl's tree does not have at its root."""
_OF_A_WHOLE_TREE = (
    "actor_rollout_ref.rollout.layered_summon", "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.actor.checkpoint.async_save", "data.datagen.path",
    "trainer.esi_redundant_time", "reward_model.sandbox_fusion.url",
)  # fmt: skip
"""Keys that nobody writes all of, and that are all in a tree that verl has composed."""
_TARGET = "_target_"
"""Hydra's own key: the class of a section."""


def is_verl_tree(root: Mapping[str, Any]) -> bool:
    """Whether a run file's sections are verl's.

    Raises:
        ConfigError: where they are of both trees, and none of them decides.
    """
    if any(key in root for key in _SURE):
        return True
    theirs = next((key for key in _LIKELY if key in root), None)
    ours = next((key for key in _OURS if key in root), None)
    if theirs and ours:
        raise ConfigError(
            f"{theirs!r} is a section of verl's tree, and {ours!r} one of ours",
            key=theirs,
            expected="one tree: verl's has its model under actor_rollout_ref.model; in ours "
            "reward_model and custom_reward_function are the section `reward`",
        )
    return theirs is not None


class GivenTree:
    """The keys that were given, over verl 0.6.1's defaults. Interpolations refer to both.

    Args:
        given: What file and command line say.
        overridden: Keys that were given on the command line.
    """

    def __init__(self, given: DictConfig, overridden: Sequence[str] = ()) -> None:
        self._given = given
        self._overridden = frozenset(overridden)
        self._merged = _over_defaults(given)
        self._leaves: dict[str, None] | None = None

    @property
    def leaves(self) -> dict[str, None]:
        """The given keys, in their order: those of the table, and below sections what is unknown.

        Raises:
            ConfigError: for an interpolation that leads nowhere.
        """
        if self._leaves is None:
            raw = OmegaConf.to_container(self._given, resolve=False)
            self._leaves = dict.fromkeys(self._walk("", raw))
        return self._leaves

    def is_given(self, key: str) -> bool:
        """Whether the file or the command line sets a key, or one below it."""
        return key in self.leaves or any(leaf.startswith(f"{key}.") for leaf in self.leaves)

    def is_changed(self, key: str) -> bool:
        """Whether the file or the command line sets a key to something else than verl's default."""
        row = find_key(key)
        return self.is_given(key) and (row is None or self.shown(key) != row.default)

    def is_chosen(self, key: str) -> bool:
        """Whether somebody chose a key's value, be it verl's default.

        In a whole tree, as verl prints it by `--cfg job`, every key is given; there a default is
        taken for no choice, unless the command line has it.
        """
        is_written = key in self._overridden or not self._is_whole
        return self.is_changed(key) or (self.is_given(key) and is_written)

    @cached_property
    def _is_whole(self) -> bool:
        return all(self.is_given(name) for name in _OF_A_WHOLE_TREE)

    def value(self, key: str) -> Any:
        """Resolve a key's value, as plain Python; None for one that has neither value nor default.

        Raises:
            ConfigError: for an interpolation that leads nowhere, a value that must be given.
        """
        try:
            found: Any = OmegaConf.select(self._merged, key, throw_on_missing=True)
            if isinstance(found, DictConfig | ListConfig):
                return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            told, expected = unresolved(error)
            raise ConfigError(told, key=key, expected=expected) from None
        return found

    def shown(self, key: str) -> Any:
        """Give a key's value for a reader: as it is written, where it cannot be resolved."""
        try:
            return self.value(key)
        except ConfigError:
            section, _, leaf = key.rpartition(".")
            raw: Any = OmegaConf.select(self._given, section) if section else self._given
            return OmegaConf.to_container(raw, resolve=False)[leaf]  # pyright: ignore

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


def _over_defaults(given: DictConfig) -> DictConfig:
    whole = cast("dict[Any, Any]", OmegaConf.to_container(given, resolve=False))
    for row in TABLE:
        if row.default != UNSET:
            _put_default(whole, row.name.split("."), row.default)
    return OmegaConf.create(whole)


def _put_default(whole: dict[Any, Any], path: list[str], default: Any) -> None:
    """Put a default where nothing was given; a section that is no mapping is left as it is."""
    *sections, leaf = path
    for section in sections:
        if whole.get(section) is None:
            whole[section] = {}
        if not isinstance(whole[section], dict):
            return
        whole = cast("dict[Any, Any]", whole[section])
    whole.setdefault(leaf, default)
