"""Read an interaction YAML into checked interactions."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import AgentRLError, ConfigError, DataError, PluginError
from agentrl.interactions.base import SHARED_KEYS, BaseInteraction
from agentrl.plugins import load_class
from agentrl.plugins.call import check_takes
from agentrl.plugins.from_verl import (
    VERL_INTERACTIONS,
    name_translated,
    translate,
    warn_of_dropped_keys,
)
from agentrl.plugins.keys import add_place, read_entries

NO_INTERACTION = "none"
"""The name in a row that selects no interaction, for any data source."""

_COMPAT = "agentrl.compat."
_BASE = "agentrl.interactions.BaseInteraction"


class InteractionEntry(BaseModel):
    """One interaction of an interaction YAML."""

    model_config = ConfigDict(extra="forbid")

    class_name: str = Field(
        description="the path of a BaseInteraction subclass, as package.module.Name"
    )
    name: str | None = Field(
        default=None, min_length=1, description="the name by which rows select it, or null"
    )
    data_sources: list[str] = Field(
        default_factory=list[str],
        description="a list of data sources; their rows select it if they name none",
    )
    config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="a mapping, passed to the class"
    )


def initialize_interactions_from_config(path: str | Path) -> dict[str, BaseInteraction]:
    """Build the interactions that a YAML lists, by name.

    The default name is the class name without "Interaction", in lower case. The name is added to
    `config`. Every class is loaded and checked before any is built.

    Raises:
        ConfigError: if the file cannot be read, for an invalid or unknown key, and for two
            interactions of one name or data source.
        MissingExtraError: if the packages of a bundled interaction are not installed.
        PluginError: if a class path does not exist, or is not a `BaseInteraction`.
    """
    entries = read_entries(path, "interaction", InteractionEntry)
    classes = [_class(entry, f"interaction[{i}]", path) for i, entry in enumerate(entries)]
    names = [entry.name or default_name(c) for entry, c in zip(entries, classes, strict=True)]
    _check_names(names, path)
    _check_sources(entries, path)
    for index, entry in enumerate(entries):
        timeout_s = entry.config.get("timeout_s", 1.0)
        if not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ConfigError(
                f"timeout_s is {timeout_s!r}",
                file=path,
                key=f"interaction[{index}].config.timeout_s",
                expected="seconds, more than 0",
            )
    return {
        name: _build(classes[index], name, entries[index], f"interaction[{index}]", path)
        for index, name in enumerate(names)
    }


def classes_of_verl(path: str | Path) -> list[str]:
    """Return verl's classes in a YAML, each with the class of agentrl that replaces it."""
    entries = read_entries(path, "interaction", InteractionEntry)
    return name_translated((entry.class_name for entry in entries), VERL_INTERACTIONS)


def select_interaction(
    interactions: Mapping[str, BaseInteraction],
    kwargs: Mapping[str, Any],
    *,
    data_source: str | None = None,
) -> BaseInteraction | None:
    """Select the interaction of a row: by name, else by source, else the only one of the run.

    Args:
        interactions: The run's interactions.
        kwargs: The row's `interaction_kwargs`. The name `none` selects none.
        data_source: The row's data source.

    Returns:
        The interaction; None if the row selects none.

    Raises:
        DataError: if there is no such interaction; it lists the known names.
    """
    name = kwargs.get("name")
    if not interactions or name == NO_INTERACTION:
        return None
    if name is None:
        for interaction in interactions.values():
            if data_source in interaction.data_sources:
                return interaction
        if not kwargs:
            return None
        if len(interactions) == 1:  # any kwargs select the only one
            return next(iter(interactions.values()))
    if name not in interactions:
        raise DataError(
            f"the row asks for the interaction {name!r}",
            key="extra_info.interaction_kwargs.name",
            expected=f"one of {', '.join(sorted(interactions))}",
        )
    return interactions[str(name)]


def default_name(interaction: type[BaseInteraction]) -> str:
    """Return the default name of a class: `gsm8k` for `Gsm8kInteraction`."""
    return interaction.__name__.removesuffix("Interaction").lower() or "interaction"


def _class(entry: InteractionEntry, key: str, path: str | Path) -> type[BaseInteraction]:
    try:
        class_path = translate(entry.class_name, VERL_INTERACTIONS, base=_BASE)
        found = load_class(class_path, BaseInteraction, file=path)
    except PluginError as error:
        details = {"file": path, **error.details, "key": f"{key}.class_name"}
        raise PluginError(str(error.args[0]), **details) from error
    if hasattr(found, "create") and found.start_interaction is BaseInteraction.start_interaction:
        raise ConfigError(
            f"{found.__name__} defines create, which is never called, and no start_interaction",
            file=path,
            key=f"{key}.class_name",
            expected="start_interaction for create, and finalize_interaction for release",
        )
    return found


def _check_names(names: Sequence[str], path: str | Path) -> None:
    for index, name in enumerate(names):
        message = None
        if name == NO_INTERACTION:
            message = f"the name {name!r} is reserved: rows use it to select no interaction"
        elif name in names[:index]:
            message = f"two interactions have the name {name!r}"
        if message is not None:
            key = f"interaction[{index}].name"
            raise ConfigError(message, file=path, key=key, expected="a name for each interaction")


def _check_sources(entries: Sequence[InteractionEntry], path: str | Path) -> None:
    claimed: set[str] = set()
    for index, entry in enumerate(entries):
        for source in entry.data_sources:
            if source in claimed:
                raise ConfigError(
                    f"two interactions claim the data source {source!r}",
                    file=path,
                    key=f"interaction[{index}].data_sources",
                    expected="one interaction for each source",
                )
            claimed.add(source)


def _build(
    found: type[BaseInteraction], name: str, entry: InteractionEntry, key: str, path: str | Path
) -> BaseInteraction:
    if found.__module__.startswith(_COMPAT):
        warn_of_dropped_keys(entry.config, found, file=path, key=f"{key}.config", read=SHARED_KEYS)
    try:
        interaction = found({**entry.config, "name": name})
    except AgentRLError as error:
        add_place(error, file=path, key=f"{key}.config")
        raise
    except Exception as error:
        raise ConfigError(
            f"building {found.__name__} raised {type(error).__name__}: {error}",
            file=path,
            key=f"{key}.config",
            expected="a config that the class takes",
        ) from error
    if not (hasattr(interaction, "config") and hasattr(interaction, "name")):
        raise ConfigError(
            f"the constructor of {found.__name__} does not call super().__init__",
            file=path,
            key=f"{key}.class_name",
            expected="super().__init__(config) as its first line",
        )
    try:
        _check_methods(interaction)
    except AgentRLError as error:
        add_place(error, file=path, key=f"{key}.class_name")
        raise
    interaction.data_sources = tuple(entry.data_sources)
    return interaction


def _check_methods(interaction: BaseInteraction) -> None:
    """Check that the methods take what the library passes; a method without parameters may."""
    generate = interaction.generate_response
    if getattr(generate, "__func__", None) is BaseInteraction.generate_response:
        raise ConfigError(
            f"{type(interaction).__name__} has no generate_response",
            expected="a method generate_response(self, instance_id, messages, **kwargs)",
        )
    methods = {
        interaction.start_interaction: ["instance_id"],
        generate: ["instance_id", "messages"],
        interaction.finalize_interaction: ["instance_id"],
    }
    for method, names in methods.items():
        check_takes(method, names if inspect.signature(method).parameters else [], is_partial=True)
