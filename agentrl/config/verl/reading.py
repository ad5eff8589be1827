"""Read verl's tree into a configuration of ours, and report on every key of it.

A key that would change what is trained, and has no counterpart, is an error; so is one that neither
verl nor agentrl knows. Where a key is left out verl's default holds, not ours. Keys of ours that
verl does not have may stand beside verl's, under our name or below `actor_rollout_ref`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig
from pydantic import BaseModel, ValidationError

from agentrl.config.dead_keys import find_dead_keys
from agentrl.config.problems import (
    Problem,
    known_keys,
    naming_file,
    nearest_key,
    problems_of,
    raise_problems,
    told_where,
)
from agentrl.config.schema.run import RunConfig
from agentrl.config.verl.mapping import UNSET, Dead, Left, Refused, Taken, Unused, VerlKey
from agentrl.config.verl.other_trainers import find_other_trainers
from agentrl.config.verl.report import LeftKey, TakenKey, VerlReport, shown
from agentrl.config.verl.table import TABLE, find_key, is_section, single_keys
from agentrl.config.verl.tree import GivenTree
from agentrl.errors import ConfigError
from agentrl.validation_messages import section_types

Item = TakenKey | LeftKey


class VerlRun(NamedTuple):
    """A configuration that was written for verl."""

    config: RunConfig
    report: VerlReport


def read_verl_tree(
    given: DictConfig, *, file: str | Path | None = None, overridden: Sequence[str] = ()
) -> VerlRun:
    """Read verl's tree.

    Args:
        given: What file and command line say, unresolved.
        file: Named in errors.
        overridden: Keys that were given on the command line, to say so in errors.

    Raises:
        ConfigError: with every key that is unknown, cannot be meant here, or holds a wrong value.
    """
    if others := find_other_trainers(given, file):
        raise_problems([told_where(problem, overridden) for problem in others], file)
    tree, problems = GivenTree(given, overridden), list[Problem]()
    with naming_file(file):
        items = list(_read_given(tree, problems))
    taken = [item for item in items if isinstance(item, TakenKey)]
    problems += _conflicts(taken)
    defaults = list(_read_defaults(tree, {key for i in taken for key in i.settings}, problems))
    if problems:
        raise_problems([told_where(problem, overridden) for problem in problems], file)
    # A default of verl's without effect would be reported as a key that the user chose.
    config = _validate([*taken, *defaults], file, overridden)
    idle = {dead.key for dead in find_dead_keys(config)}
    taken = [item if tree.is_changed(item.key) else _without(item, idle) for item in taken]
    defaults = [item for item in (_without(i, idle) for i in defaults) if item.settings]
    config = _validate([*taken, *defaults], file, overridden)
    left = [item for item in items if isinstance(item, LeftKey)]
    return VerlRun(config, VerlReport((*taken, *defaults), tuple(left)))


def _without(item: TakenKey, idle: set[str]) -> TakenKey:
    kept = {key: value for key, value in item.settings.items() if key not in idle}
    return replace(item, settings=kept)


def _read_given(tree: GivenTree, problems: list[Problem]) -> Iterator[Item]:
    for key in tree.leaves:
        row = find_key(key)
        try:
            yield _read_row(row, key, tree) if row else _read_ours(key, tree)
        except ConfigError as error:
            problems.append(_problem(key, error))


def _read_defaults(
    tree: GivenTree, settled: set[str], problems: list[Problem]
) -> Iterator[TakenKey]:
    """Apply verl's defaults where a key was left out, and they differ from ours."""
    for row in TABLE:
        if row.default == UNSET or not isinstance(row.fate, Taken) or tree.is_given(row.name):
            continue
        try:
            item = _read_row(row, row.name, tree)
        except ConfigError as error:
            problems.append(_problem(row.name, error))
            continue
        if isinstance(item, TakenKey):
            theirs = {k: v for k, v in item.settings.items() if k not in settled}
            differing = {k: v for k, v in theirs.items() if v != our_defaults().get(k, UNSET)}
            if differing:
                yield replace(item, settings=differing, is_default=True)


def _read_row(row: VerlKey, key: str, tree: GivenTree) -> Item:
    fate = row.fate
    if isinstance(fate, Left | Dead):
        return _left(row, key, fate, tree)
    value = tree.value(key)
    if isinstance(fate, Refused):
        asks_nothing = value is None and any(harmless in (False, 0) for harmless in fate.harmless)
        if asks_nothing or value in fate.harmless:
            return TakenKey(key, value, {})
        told = f"{shown(value)} asks for what is not here: {fate.why}"
        raise ConfigError(told, expected=" or ".join(map(shown, fate.harmless)))
    reading = fate.read(value, tree)
    if isinstance(reading, Unused | Left):
        return _left(row, key, reading, tree)
    return TakenKey(key, value, reading.settings, reading.note, part_of=reading.part_of)


def _left(row: VerlKey, key: str, fate: Left | Dead | Unused, tree: GivenTree) -> LeftKey:
    return LeftKey(
        key,
        tree.shown(key),
        fate.why,
        is_dead=not isinstance(fate, Left),
        row=row.name if row.name != key else "",
        is_default=not tree.is_changed(key),
    )


def _read_ours(key: str, tree: GivenTree) -> TakenKey:
    """Take a key that verl does not have and agentrl does.

    Raises:
        ConfigError: where neither has it, with the nearest of either.
    """
    ours = key.removeprefix("actor_rollout_ref.")
    if ours in _our_leaves() or any(ours.startswith(f"{open_}.") for open_ in _our_mappings()):
        return TakenKey(key, tree.value(key), {ours: tree.value(key)})
    if ours in known_keys() and tree.value(key) in (None, {}):
        return TakenKey(key, tree.value(key), {})
    if is_section(key):
        held = f"{shown(tree.value(key))} stands where verl has a section"
        raise ConfigError(held, expected="a mapping of keys to values")
    near = nearest_key(key, known=(*single_keys(), *known_keys()))
    raise ConfigError(
        "unknown key" + (f"; did you mean {near!r}?" if near else ""),
        expected="a key of verl 0.6.1, or one of agentrl's",
    )


def _conflicts(taken: Sequence[TakenKey]) -> Iterator[Problem]:
    """Find keys of ours that two given keys set to different values."""
    first: dict[str, TakenKey] = {}
    for item in taken:
        for key, value in item.settings.items():
            other = first.setdefault(key, item)
            if other.settings[key] != value:
                told = f"means {key}={shown(value)}, and {other.key} means {key}="
                yield Problem(item.key, told + shown(other.settings[key]), "one of the two")


def _problem(key: str, error: ConfigError) -> Problem:
    expected = error.details.get("expected")
    return Problem(key, str(error.args[0]), None if expected is None else str(expected))


def _validate(
    taken: Sequence[TakenKey], file: str | Path | None, overridden: Sequence[str]
) -> RunConfig:
    raw: dict[str, Any] = {}
    for item in taken:
        for key, value in item.settings.items():
            _put(raw, key, value)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        origins = VerlReport(tuple(taken), ()).origins
        problems = [_in_their_names(problem, origins) for problem in problems_of(error)]
        raise_problems([told_where(problem, overridden) for problem in problems], file)


def _in_their_names(problem: Problem, origins: dict[str, str]) -> Problem:
    for ours, theirs in origins.items():
        if problem.key == ours or problem.key.startswith((f"{ours}.", f"{ours}[")):
            told = f"{problem.message} (read as {problem.key})" if ours != theirs else None
            return replace(problem, key=theirs, message=told or problem.message)
    return problem


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
    raw[leaf] = value


@cache
def our_defaults() -> dict[str, Any]:
    """List the default of every key of ours, by dotted name; as YAML has it, lists for tuples."""
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


@cache
def _our_mappings() -> tuple[str, ...]:
    """List the keys of ours below which any key may stand."""
    return tuple(key for key in _our_leaves() if isinstance(our_defaults()[key], dict))
