"""Read verl's tree into a configuration of agentrl, and report on every key of it.

A key that would change what is trained, and has no counterpart, is an error; so is a key that
neither verl nor agentrl knows. If a key is left out, verl's default holds, not agentrl's. Keys that
only agentrl has may be next to verl's, under agentrl's name or below `actor_rollout_ref`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig
from pydantic import BaseModel, ValidationError

from agentrl.config.dead_keys import find_dead_keys
from agentrl.config.other_names import find_refusal
from agentrl.config.problems import (
    Problem,
    known_keys,
    mark_overridden,
    naming_file,
    problems_of,
    raise_problems,
    unknown_key,
)
from agentrl.config.schema.run import RunConfig
from agentrl.config.verl.mapping import UNSET, Ignored, KeyMapping, Mapped, Rejected, Unsupported
from agentrl.config.verl.policy_readers import is_trained
from agentrl.config.verl.report import DroppedKey, MappedKey, VerlReport, shown
from agentrl.config.verl.reward_model_readers import reward_model
from agentrl.config.verl.table import find_key, is_section, single_keys, table
from agentrl.config.verl.tree import GivenTree, find_other_trainers
from agentrl.errors import ConfigError
from agentrl.given_texts import Loc, value_at, with_texts
from agentrl.validation_messages import section_types


class VerlRun(NamedTuple):
    """A configuration that was written for verl."""

    config: RunConfig
    report: VerlReport


def read_verl_tree(
    given: DictConfig,
    texts: Callable[[], DictConfig] | None = None,
    *,
    file: str | Path | None = None,
    overridden: Sequence[str] = (),
) -> VerlRun:
    """Read verl's tree.

    Args:
        given: The content of file and command line, unresolved.
        texts: Returns the same with the given text as each value.
        file: Named in errors.
        overridden: Keys that were given on the command line; errors say so.

    Raises:
        ConfigError: with every key that is unknown, has no meaning here, or has a wrong value.
    """
    tree, problems = GivenTree(given, overridden), find_other_trainers(given, file)
    _raise(problems, file, overridden)
    with naming_file(file):
        items = list(_read_given(tree, problems))
    mapped = [item for item in items if isinstance(item, MappedKey)]
    problems += _conflicts(mapped)
    defaults = list(_read_defaults(tree, {key for i in mapped for key in i.settings}, problems))
    _raise(problems, file, overridden)
    if texts is not None:
        mapped = _with_texts(mapped, tree, texts)
    # A default of verl without effect must not be reported as a key that the user chose.
    config = _validate([*mapped, *defaults], file, overridden)
    dead = {key.key for key in find_dead_keys(config)}
    mapped = [item if tree.is_changed(item.key) else _without(item, dead) for item in mapped]
    defaults = [item for item in (_without(i, dead) for i in defaults) if item.settings]
    config = _validate([*mapped, *defaults], file, overridden)
    dropped = tuple(item for item in items if isinstance(item, DroppedKey))
    return VerlRun(config, VerlReport((*mapped, *defaults), dropped))


def _raise(problems: Sequence[Problem], file: str | Path | None, overridden: Sequence[str]) -> None:
    if problems:
        raise_problems([mark_overridden(problem, overridden) for problem in problems], file)


def _without(item: MappedKey, dead: set[str]) -> MappedKey:
    kept = {key: value for key, value in item.settings.items() if key not in dead}
    return replace(item, settings=kept)


def _read_given(tree: GivenTree, problems: list[Problem]) -> Iterator[MappedKey | DroppedKey]:
    for key in tree.leaves:
        row = find_key(key)
        try:
            yield _read_row(row, key, tree) if row else _read_ours(key, tree)
        except ConfigError as error:
            problems.append(_problem(key, error))


def _read_defaults(
    tree: GivenTree, settled: set[str], problems: list[Problem]
) -> Iterator[MappedKey]:
    """Apply verl's defaults for keys that are left out, if they differ from agentrl's."""
    for row in table():
        if row.default == UNSET or row.outcome is not None or tree.is_given(row.name):
            continue
        try:
            item = _read_row(row, row.name, tree)
        except ConfigError as error:
            problems.append(_problem(row.name, error))
            continue
        if isinstance(item, MappedKey):
            differing = {
                key: value
                for key, value in item.settings.items()
                if key not in settled and value != our_defaults().get(key, UNSET)
            }
            if differing:
                yield replace(item, settings=differing, is_default=True)


def _read_row(row: KeyMapping, key: str, tree: GivenTree) -> MappedKey | DroppedKey:
    outcome = _of_unread_section(row, tree) or row.outcome
    if isinstance(outcome, Rejected):
        value, allowed = tree.value(key), outcome.allowed
        is_off = value is None and any(harmless in (False, 0) for harmless in allowed)
        if is_off or value in allowed:
            return MappedKey(key, value, {})
        raise ConfigError(
            f"{shown(value)} asks for what agentrl does not have: {outcome.why}",
            expected=" or ".join(map(shown, allowed)),
        )
    found = outcome or row.read(tree.value(key), tree, row)
    if isinstance(found, Mapped):
        return MappedKey(key, tree.value(key), found.settings, found.note, part_of=found.part_of)
    return DroppedKey(
        key,
        tree.shown(key),
        found.why,
        is_unsupported=isinstance(found, Unsupported),
        row=row.name if row.name != key else "",
        is_default=not tree.is_changed(key),
    )


def _of_unread_section(row: KeyMapping, tree: GivenTree) -> Ignored | None:
    """Say why verl does not read the section of a key; then its value need not even resolve."""
    is_of_critic = row.name.startswith("critic.") and row.name != "critic.enable"
    if is_of_critic and not is_trained(tree):
        return Ignored("algorithm.adv_estimator reads no values, so there is no critic")
    is_of_model = row.read.__module__ == reward_model.__module__ and row.read is not reward_model
    if is_of_model and not tree.value("reward_model.enable"):
        return Ignored("reward_model.enable is false")
    return None


def _read_ours(key: str, tree: GivenTree) -> MappedKey:
    """Take a key that verl does not have and agentrl does.

    Raises:
        ConfigError: if neither has it, with the nearest key of either.
    """
    ours, value = key.removeprefix("actor_rollout_ref."), tree.value(key)
    # Any key may be below a mapping.
    mappings = (name for name in _our_leaves() if isinstance(our_defaults()[name], dict))
    if ours in _our_leaves() or any(ours.startswith(f"{name}.") for name in mappings):
        return MappedKey(key, value, {ours: value})
    if ours in known_keys() and value in (None, {}):
        return MappedKey(key, value, {})
    if is_section(key):
        message = f"is {shown(value)}, and verl has a section there"
        raise ConfigError(message, expected="a mapping of keys to values")
    expected = None if find_refusal(key) else "a key of verl 0.6.1, or one of agentrl's"
    raise ConfigError(unknown_key(key, (*single_keys(), *known_keys())), expected=expected)


def _conflicts(mapped: Sequence[MappedKey]) -> Iterator[Problem]:
    """Find keys of agentrl that two given keys set to different values."""
    first: dict[str, MappedKey] = {}
    for item in mapped:
        for key, value in item.settings.items():
            other = first.setdefault(key, item)
            if other.settings[key] != value:
                message = f"means {key}={shown(value)}, and {other.key} means {key}="
                yield Problem(item.key, message + shown(other.settings[key]), "one of the two")


def _problem(key: str, error: ConfigError) -> Problem:
    expected = error.details.get("expected")
    return Problem(key, str(error.args[0]), None if expected is None else str(expected))


def _with_texts(
    mapped: Sequence[MappedKey], tree: GivenTree, texts: Callable[[], DictConfig]
) -> list[MappedKey]:
    """Take the given text of values that are refused, for keys whose type is text."""

    def text_at(loc: Loc) -> Any:
        for item in mapped:
            for key, value in item.settings.items():
                parts = tuple(key.split("."))
                is_read_unchanged = repr(value) == repr(tree.value(item.key))
                if loc[: len(parts)] == parts and is_read_unchanged:
                    return value_at(GivenTree(texts()).value(item.key), loc[len(parts) :])
        return None

    fixed = with_texts(RunConfig.model_validate, _nested(mapped), text_at)
    return [
        replace(item, settings={key: value_at(fixed, key.split(".")) for key in item.settings})
        for item in mapped
    ]


def _nested(mapped: Sequence[MappedKey]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for item in mapped:
        for key, value in item.settings.items():
            *sections, leaf = key.split(".")
            section = raw
            for name in sections:
                section = section.setdefault(name, {})
            section[leaf] = value
    return raw


def _validate(
    mapped: Sequence[MappedKey], file: str | Path | None, overridden: Sequence[str]
) -> RunConfig:
    try:
        return RunConfig.model_validate(_nested(mapped))
    except ValidationError as error:
        origins, problems = VerlReport(tuple(mapped), ()).origins, problems_of(error)
        _raise([_in_their_names(problem, origins) for problem in problems], file, overridden)
        raise


def _in_their_names(problem: Problem, origins: dict[str, str]) -> Problem:
    for ours, theirs in origins.items():
        if problem.key == ours or problem.key.startswith((f"{ours}.", f"{ours}[")):
            note = f" (read as {problem.key})" if ours != theirs else ""
            return replace(problem, key=theirs, reason=problem.reason + note)
    return problem


@cache
def our_defaults() -> dict[str, Any]:
    """Return the default of every key of agentrl, by dotted name; lists for tuples, as in YAML."""
    return dict(_defaults_under(RunConfig, ""))


def _defaults_under(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, info in section.model_fields.items():
        default: Any = info.get_default(call_default_factory=True)
        if isinstance(default, tuple):
            default = list(cast("tuple[Any, ...]", default))
        yield prefix + name, default
        for inner in section_types(info.annotation):
            yield from _defaults_under(inner, f"{prefix}{name}.")


@cache
def _our_leaves() -> frozenset[str]:
    keys = set(known_keys())
    return frozenset(keys - {key.rpartition(".")[0] for key in keys})
