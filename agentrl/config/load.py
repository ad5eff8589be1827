"""Read a run file: YAML and overrides in, a checked `RunConfig` out.

Paths in a run file are relative to the working directory of the command, as in verl. OmegaConf
resolves interpolations (`${data.seed}`, `${oc.env:HOME}`). A file in verl's key tree is recognized
and converted (`agentrl.config.verl`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from agentrl.config.other_names import read_other_names
from agentrl.config.overrides import apply_overrides, key_of
from agentrl.config.problems import (
    ON_COMMAND_LINE,
    Problem,
    is_under,
    naming_file,
    problems_of,
    raise_problems,
)
from agentrl.config.schema.run import RunConfig
from agentrl.config.verl import VerlReport, is_verl_tree, read_verl_tree, refuse_mixed
from agentrl.config.verl.table import single_keys
from agentrl.errors import AgentRLError, ConfigError
from agentrl.given_texts import load_yaml, value_at, with_texts
from agentrl.validation_messages import describe_malformed, describe_unresolved

logger = logging.getLogger(__name__)


class ReadConfig(NamedTuple):
    """A run file that was read."""

    config: RunConfig
    report: VerlReport | None
    """What each key became, if the file is in verl's key tree."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and check every key of it.

    Args:
        path: A YAML file, with agentrl's keys or with verl's; the report on verl's keys is logged.
        overrides: `section.key=value`, the value in YAML; a later one wins.

    Raises:
        ConfigError: with the file, the key, what was expected and the nearest known key; all
            problems in one error, a line for each.

    Example:
        >>> config = load_config("run.yaml", ["trainer.total_training_steps=3"])  # doctest: +SKIP
    """
    config, report = read_config(path, overrides)
    if report is not None:
        logger.warning("%s: %s", path, report.summarize())
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> ReadConfig:
    """Read a run file as `load_config` does, and return the report instead of logging it.

    Raises:
        ConfigError: see `load_config`.
    """
    file = Path(path)
    overridden = [key_of(override) for override in overrides]
    base = _read_yaml(file)
    refuse_mixed(base, overridden)
    given = apply_overrides(base, overrides)
    # The same with the given text as each value; read only if a value is refused.
    texts = cache(
        lambda: apply_overrides(_read_yaml(file, as_texts=True), overrides, as_texts=True)
    )
    with naming_origin(overrides):
        with naming_file(file):
            is_verls = is_verl_tree(given)
            moved = read_other_names(given, single_keys() if is_verls else ())
        overridden = [moved.get(key, key) for key in overridden]
        if is_verls:
            return ReadConfig(*read_verl_tree(given, texts, file=file, overridden=overridden))
        resolved = _resolve(given, file)
    return ReadConfig(_validate(resolved, file, overridden, texts), None)


@contextmanager
def naming_origin(overrides: Sequence[str], report: VerlReport | None = None) -> Generator[None]:
    """Let an error of the `with` block name its key, and its origin, as the user wrote them.

    Args:
        overrides: Of the command line: an error about a key that they set does not name the file.
        report: Of a file in verl's key tree: errors also give verl's names of keys.
    """
    try:
        yield
    except AgentRLError as error:
        if report is not None and isinstance(error, ConfigError):
            error.details |= report.name_in_verl(str(error))
        key = str(error.details.get("key", "")).partition("[")[0]
        given = key if report is None else report.origins.get(key, key)
        if "file" in error.details and is_under(given, map(key_of, overrides)):
            del error.details["file"]
            error.args = (f"{error.args[0]} {ON_COMMAND_LINE}",)
        raise


def parse_config(raw: Mapping[str, Any], *, file: str | Path | None = None) -> RunConfig:
    """Check a configuration that was built in Python, as `load_config` checks a file's.

    Raises:
        ConfigError: see `load_config`.
    """
    given = OmegaConf.create(dict(raw), flags={"allow_objects": True})
    is_verls = is_verl_tree(raw)
    moved = read_other_names(given, single_keys() if is_verls else ())
    if is_verls:
        config, report = read_verl_tree(given, file=file)
        logger.warning("%s", report.summarize())
        return config
    return _validate(_resolve(given, file) if moved else dict(raw), file, ())


def _read_yaml(file: Path, *, as_texts: bool = False) -> DictConfig:
    try:
        loaded = load_yaml(file, as_texts=as_texts)
    except FileNotFoundError:
        raise ConfigError(f"no file {file}", file=file, expected="a YAML run file") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(describe_malformed(error, file), file=file) from None
    except OmegaConfBaseException as error:
        message = f"malformed interpolation: {_first_line(error)}"
        raise ConfigError(message, file=file, key=error.full_key) from None
    # ValueError: a number with more digits than Python reads.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the file: {_first_line(error)}", file=file) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError("no mapping of sections", file=file, expected="sections such as `data:`")
    return loaded


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _resolve(config: DictConfig, file: str | Path | None) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        message, expected = describe_unresolved(error)
        raise ConfigError(message, file=file, key=error.full_key, expected=expected) from None
    return resolved  # pyright: ignore[reportReturnType]


def _validate(
    raw: dict[str, Any],
    file: str | Path | None,
    overridden: Sequence[str],
    texts: Callable[[], DictConfig] | None = None,
) -> RunConfig:
    def check(values: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate(_with_named_files(values, file))

    if texts is not None:
        all_texts = cache(lambda: OmegaConf.to_container(texts(), resolve=True))
        raw = with_texts(check, raw, lambda loc: value_at(all_texts(), loc))
    try:
        return check(raw)
    except ValidationError as error:
        raise_problems(problems_of(error, overridden), file)


def _with_named_files(raw: dict[str, Any], file: str | Path | None) -> dict[str, Any]:
    """Accept a single path for a list of files, and name validation files by their stems."""
    if not isinstance(raw.get("data"), Mapping):
        return raw
    data = dict(cast("Mapping[str, Any]", raw["data"]))
    for key in ("train_files", "val_files"):
        if isinstance(data.get(key), str | Path):
            data[key] = [data[key]]
    paths = data.get("val_files")
    if isinstance(paths, list) and all(isinstance(p, str | Path) for p in cast("list[Any]", paths)):
        data["val_files"] = _by_stem(cast("list[str | Path]", paths), file)
    return raw | {"data": data}


def _by_stem(paths: Sequence[str | Path], file: str | Path | None) -> dict[str, str | Path]:
    stems = [Path(path).stem for path in paths]
    repeated = [stem for stem, count in Counter(stems).items() if count > 1]
    if repeated:
        reason = f"several files would be named {repeated[0]!r}"
        wanted = "names, as in `val_files: {easy: a/val.parquet, hard: b/val.parquet}`"
        raise_problems([Problem("data.val_files", reason, wanted)], file)
    return dict(zip(stems, paths, strict=True))
