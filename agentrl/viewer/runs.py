"""Read a run's folder while it may still be written: metrics, configuration, rollout files."""

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from agentrl.messages import dump_json
from agentrl.trainer.metrics.sinks import METRICS_FILE
from agentrl.trainer.rollouts.line_files import find_rollout_files
from agentrl.trainer.state.run_folder import (
    LOCK_FILE,
    RESOLVED,
    Owner,
    check_run_folder,
    find_last_start,
    move_paths,
)
from agentrl.viewer.index import Entry, FileIndex, index_file, signature_of

_FOLDER_KEY = "trainer.default_local_dir"
_NOT_SET = object()
_FOLDERS = ("rollouts", "val_rollouts", "validation", "skipped")
"""Subfolders of a run in which rollouts are also looked for: the run may have been moved."""
_MAX_TEXT_BYTES = 1 << 29
"""Memory for the texts of conversations of a run."""


class RecordedConfig(NamedTuple):
    """A resolved configuration, and the directory to which its relative paths are relative."""

    values: Mapping[str, Any]
    directory: str = ""

    def resolve(self, value: Any) -> Any:
        """Return a text as an absolute path; a text that is no path is changed too."""
        is_text = isinstance(value, str) and self.directory
        return os.path.realpath(os.path.join(self.directory, value)) if is_text else value

    def own(self, value: Any) -> Any:
        """Return a value, with the run's folder replaced in paths in it."""
        if isinstance(value, list):
            return [self.own(one) for one in value]
        folder = (self.values.get("trainer") or {}).get("default_local_dir")
        if not (folder and isinstance(value, str) and os.sep in value):
            return value
        path, folder = Path(self.resolve(value)), Path(self.resolve(folder))
        if not path.is_relative_to(folder):
            return value
        return "/".join((f"${{{_FOLDER_KEY}}}", *path.relative_to(folder).parts))


class RunReader:
    """Reads one run's folder; what has not changed is not read again.

    Args:
        folder: `trainer.default_local_dir` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: list[dict[str, Any]] = []
        self._metrics_end = 0
        self._metrics_inode = 0
        self._config: tuple[Path | None, dict[str, Any]] = None, {}
        self._moved: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._tokenizer: tuple[Path | None, Tokenizer | None] = None, None
        self._files: dict[str, FileIndex] = {}
        self._metrics_lock = threading.Lock()
        self._files_lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def check(self) -> None:
        """Raise a `ConfigError` if the folder is not that of a run and has no rollouts."""
        if not (self.folder.is_dir() and self.find_files()):
            check_run_folder(self.folder)

    @property
    def state(self) -> str:
        """Whether the run is `running`, `finished` or `stopped`."""
        owner = None
        with suppress(OSError), (self.folder / LOCK_FILE).open(encoding="utf-8") as lock:
            owner = Owner.read(lock)
        if owner is not None:
            is_over = owner.is_here and owner.has_ended()
            return "stopped" if is_over else "running"
        return "finished" if (self.folder / "summary.json").is_file() else "stopped"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of the last start; empty if there is none."""
        newest = find_last_start(self.folder)
        if newest is not None and newest != self._config[0]:
            with suppress(OSError, yaml.YAMLError):
                loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
                config = yaml.load((newest / RESOLVED).read_bytes(), loader)
                if isinstance(config, dict):
                    self._config = newest, config
        return self._config[1]

    @property
    def recorded_config(self) -> RecordedConfig:
        """The configuration, and the directory in which the last start was made."""
        config, (newest, _) = self.config, self._config
        directory = ""
        if newest is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                directory = str(json.loads((newest / "run.json").read_bytes())["directory"])
        return RecordedConfig(config, directory)

    def _moved_config(self) -> dict[str, Any]:
        """Return the configuration with the paths of the run's folder as it is now."""
        config = self.config
        if self._moved[0] is not config:
            self._moved = config, move_paths(config, self.folder)
        return self._moved[1]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, of which only new ones are read."""
        path = self.folder / METRICS_FILE
        with self._metrics_lock, suppress(FileNotFoundError), path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_replaced = status.st_ino != self._metrics_inode
            if is_replaced or status.st_size < self._metrics_end:  # of a resumed run
                self._metrics, self._metrics_end = [], 0
                self._metrics_inode = status.st_ino
            file.seek(self._metrics_end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._metrics_end += len(line)
                with suppress(ValueError):
                    self._metrics.append(json.loads(line))
        return self._metrics

    # Rollouts

    def find_files(self) -> dict[str, Path]:
        """Find the rollout files by label (`rollouts/step_000010`), the newest step first.

        Files of one step are in the order of their folders: that of the configuration is first.
        """
        found: dict[str, tuple[int, Path]] = {}
        for folder in self._find_folders():
            for file in find_rollout_files(folder):
                found.setdefault(f"{folder.name}/{file.label}", (-file.step, file.path))
        ranked = sorted(found.items(), key=lambda item: item[1][0])
        return {label: path for label, (_, path) in ranked}

    def find_steps(self, steps: Sequence[int]) -> list[str | None]:
        """Find the label of each step's file: of training, else of validation; None: it has none.

        The configured folder is the first in which it is looked for. Without steps, the result is
        the newest file.
        """
        labels = list(self.find_files())
        if not steps:
            return [next(iter(labels), None)]
        names = [(f"/step_{step:06d}", f"_{step:06d}") for step in steps]
        return [
            next((label for name in ends for label in labels if label.endswith(name)), None)
            for ends in names
        ]

    @property
    def rollout_folder(self) -> str | None:
        """`trainer.rollout_data_dir`, which may have been removed; None if it is not set."""
        return (self._moved_config().get("trainer") or {}).get("rollout_data_dir")

    def _find_folders(self) -> list[Path]:
        trainer = self._moved_config().get("trainer") or {}
        keys = ("rollout_data_dir", "validation_data_dir")
        given = [Path(trainer[key]) for key in keys if trainer.get(key)]
        folders = [*given, *(self.folder / name for name in _FOLDERS)]
        return list({folder.resolve(): folder for folder in folders}.values())

    def index(self, label: str, path: Path | None = None) -> FileIndex:
        """Return the index of a file; read it if it is new or has changed.

        Args:
            label: Its label.
            path: Its path, if `find_files` has just returned it.

        Raises:
            LookupError: If there is no such file.
        """
        path = path or self.find_files().get(label)
        if path is None:
            raise LookupError(f"the rollout file {label!r}")
        with self._files_lock:
            known = self._files.get(label)
            if known is None or known.signature != signature_of(path):
                self._files.pop(label, None)
                num_bytes = sum(index.text_bytes for index in self._files.values())
                known = self._files[label] = index_file(path, label, _MAX_TEXT_BYTES - num_bytes)
            return known

    def indexed(self, files: Mapping[str, Path] | None = None) -> dict[str, FileIndex]:
        """Return the files that have been indexed, the newest step first.

        Args:
            files: What `find_files` has just returned, if it was called.
        """
        labels = self.find_files() if files is None else files
        return {label: self._files[label] for label in labels if label in self._files}

    def entry(self, entry_id: str) -> tuple[FileIndex, Entry]:
        """Return a trajectory and its file.

        Raises:
            LookupError: If there is none.
        """
        label, _, _ = entry_id.rpartition(":")
        if label in (files := self.find_files()):
            index = self.index(label, files[label])
            for entry in index.entries:
                if entry.id == entry_id:
                    return index, entry
        raise LookupError(f"the trajectory {entry_id!r}")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model; None if it is not on this machine."""
        file = self._find_tokenizer()
        if file != self._tokenizer[0]:
            loaded = None
            with suppress(Exception):  # the library raises no narrower error
                loaded = Tokenizer.from_file(str(file))
            self._tokenizer = file, loaded
        return self._tokenizer[1]

    def _find_tokenizer(self) -> Path | None:
        """Find the file in the model's folder, the cache of the Hub, or the exported policy."""
        model = self._moved_config().get("model") or {}
        name = model.get("tokenizer_path") or model.get("path")
        folders = [Path(str(name))] if name else []
        for folder in (*folders, self.folder / "trained"):
            if (folder / "tokenizer.json").is_file():
                return folder / "tokenizer.json"
        with suppress(HFValidationError):
            cached = try_to_load_from_cache(str(name), "tokenizer.json")
            return Path(cached) if isinstance(cached, str) else None
        return None


def find_differences(configs: Sequence[RecordedConfig]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, and the value of each.

    The same file is no difference, as an absolute or a relative path. The runs' own folders, and
    the same file in each of them, are none either.

    Example:
        >>> find_differences([RecordedConfig({"a": {"b": 1}}), RecordedConfig({"a": {"b": 2}})])
        [('a.b', ['1', '2'])]
    """
    flat = [dict(_leaves(config.values)) for config in configs]
    rows = list[tuple[str, list[str]]]()
    for key in sorted({key for leaves in flat for key in leaves}):
        values = [leaves.get(key, _NOT_SET) for leaves in flat]
        if not _are_same(values, configs):
            own = [config.own(value) for config, value in zip(configs, values, strict=True)]
            is_own = all(map(ne, own, values))
            rows.append((key, [_text_of(value) for value in (own if is_own else values)]))
    return rows


def _are_same(values: Sequence[Any], configs: Sequence[RecordedConfig]) -> bool:
    if all(isinstance(value, list) for value in values) and len({*map(len, values)}) == 1:
        return all(_are_same(column, configs) for column in zip(*values, strict=True))
    pairs = list(zip(configs, values, strict=True))
    forms = (lambda _, value: value, RecordedConfig.resolve, RecordedConfig.own)
    return any(len({_text_of(form(*pair)) for pair in pairs}) == 1 for form in forms)


def _text_of(value: Any) -> str:
    if value is _NOT_SET:
        return "not set"
    return dump_json(value, default=str)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree
