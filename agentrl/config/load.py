"""Read a run file: YAML and overrides in, a checked `RunConfig` out.

Paths in a run file are relative to the directory that the command runs in, as verl's are. OmegaConf
resolves interpolations (`${data.seed}`, `${oc.env:HOME}`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from agentrl.config.problems import Problem, problems_of, raise_problems
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and check every key of it.

    Args:
        path: A YAML file.
        overrides: `section.key=value`, the value in YAML; a later one wins.

    Raises:
        ConfigError: with the file, the key, what was expected and the nearest known key; all
            problems in one error, a line for each.

    Example:
        >>> config = load_config("run.yaml", ["trainer.total_training_steps=3"])  # doctest: +SKIP
    """
    file = Path(path)
    merged = _merge(_read_yaml(file), overrides, file)
    overridden = [override.partition("=")[0].lstrip("+") for override in overrides]
    return _validate(_resolve(merged, file), file, overridden)


def parse_config(raw: Mapping[str, Any], *, file: str | Path | None = None) -> RunConfig:
    """Check a configuration that was built in Python, as `load_config` checks a file's.

    Raises:
        ConfigError: see `load_config`.
    """
    return _validate(dict(raw), file, ())


def _read_yaml(file: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no file {file}", file=file, expected="a YAML run file") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"malformed YAML{_place(error)}: {error.problem or error.context}", file=file
        ) from None
    except OmegaConfBaseException as error:
        told = f"malformed interpolation: {_first_line(error)}"
        raise ConfigError(told, file=file, key=error.full_key) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the file: {_first_line(error)}", file=file) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError("no mapping of sections", file=file, expected="sections such as `data:`")
    return loaded


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _merge(base: DictConfig, overrides: Sequence[str], file: Path) -> DictConfig:
    for override in overrides:
        # Hydra's "+key=value" adds a key; here that is the same as setting it.
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is no override", expected="section.key=value")
        try:
            base = OmegaConf.merge(base, OmegaConf.from_dotlist([override.lstrip("+")]))  # pyright: ignore[reportAssignmentType]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            told = f"cannot read the override {override!r}: {_first_line(error)}"
            raise ConfigError(told, file=file, key=key, expected="a YAML value") from None
    return base


def _resolve(config: DictConfig, file: Path) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            _first_line(error),
            file=file,
            key=error.full_key,
            expected="a value, or an interpolation that leads to one",
        ) from None
    return resolved  # pyright: ignore[reportReturnType]


def _validate(raw: dict[str, Any], file: str | Path | None, overridden: Sequence[str]) -> RunConfig:
    try:
        return RunConfig.model_validate(_with_named_files(raw, file))
    except ValidationError as error:
        raise_problems(problems_of(error, overridden), file)


def _with_named_files(raw: dict[str, Any], file: str | Path | None) -> dict[str, Any]:
    """Read a single path where the schema has a list, and name validation files by stem."""
    if not isinstance(raw.get("data"), Mapping):
        return raw
    named = dict(cast("Mapping[str, Any]", raw["data"]))
    if isinstance(named.get("train_files"), str | Path):
        named["train_files"] = [named["train_files"]]
    if (paths := _as_paths(named.get("val_files"))) is not None:
        named["val_files"] = _by_stem(paths, file)
    return raw | {"data": named}


def _as_paths(given: Any) -> list[str | Path] | None:
    """A path, or a list of paths, as a list; None for anything else."""
    if isinstance(given, str | Path):
        return [given]
    paths: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [None]
    return paths if all(isinstance(path, str | Path) for path in paths) else None


def _by_stem(paths: Sequence[str | Path], file: str | Path | None) -> dict[str, str | Path]:
    stems = [Path(path).stem for path in paths]
    repeated = [stem for stem, count in Counter(stems).items() if count > 1]
    if repeated:
        told = f"several files would be named {repeated[0]!r}"
        wanted = "names, as in `val_files: {easy: a/val.parquet, hard: b/val.parquet}`"
        raise_problems([Problem("data.val_files", told, wanted)], file)
    return dict(zip(stems, paths, strict=True))
