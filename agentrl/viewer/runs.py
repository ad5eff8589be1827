"""Read a run's folder while it may still be written: metrics, configuration, rollout files."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from agentrl.errors import ConfigError
from agentrl.trainer.metrics.sinks import METRICS_FILE
from agentrl.trainer.state.run_folder import LOCK_FILE, Owner
from agentrl.viewer.index import Entry, FileIndex, index_file, signature_of

_FILE = re.compile(r"(step|val|val_.+)_(\d{6,})\.jsonl")
_FOLDER_KEY = "trainer.default_local_dir"
_FOLDERS = ("rollouts", "val_rollouts", "validation", "skipped")
"""Subfolders of a run in which rollouts are also looked for: the run may have been moved."""


class RunReader:
    """Reads one run's folder. `refresh` finds what is new; unchanged files are not read again.

    Args:
        folder: `trainer.default_local_dir` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: list[dict[str, Any]] = []
        self._metrics_end = 0
        self._files: dict[str, FileIndex] = {}
        self._metrics_lock = threading.Lock()
        self._files_lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def check(self) -> None:
        """Raise a `ConfigError` if the folder is not that of a run and has no rollouts."""
        signs = (METRICS_FILE, "starts", LOCK_FILE)
        if not self.folder.is_dir():
            raise ConfigError(f"no folder {self.folder}", expected="the folder of a run")
        if not any((self.folder / sign).exists() for sign in signs) and not self.find_files():
            raise ConfigError(
                f"{self.folder} is not the folder of a run",
                expected=f"a folder with {', '.join(signs)}: trainer.default_local_dir of a run",
            )

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
        newest = max(self.folder.glob("starts/[0-9]*/resolved.yaml"), default=None)
        if newest is None:
            return {}
        with suppress(OSError, yaml.YAMLError):
            return yaml.load(newest.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return {}

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, of which only new ones are read."""
        path = self.folder / METRICS_FILE
        with self._metrics_lock, suppress(FileNotFoundError), path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._metrics_end:  # a resumed run drops later steps
                self._metrics, self._metrics_end = [], 0
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
        """Find the rollout files by label (`rollouts/step_000010`), the newest step first."""
        found: dict[tuple[int, str], Path] = {}
        for folder in self._folders:
            for path in folder.glob("*.jsonl"):
                if match := _FILE.fullmatch(path.name):
                    found[-int(match[2]), f"{folder.name}/{path.stem}"] = path
        return {label: path for (_, label), path in sorted(found.items())}

    @cached_property
    def _folders(self) -> list[Path]:
        trainer = self.config.get("trainer") or {}
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
        path = path or self.find_files()[label]
        with self._files_lock:
            known = self._files.get(label)
            if known is None or known.signature != signature_of(path):
                known = self._files[label] = index_file(path, label)
            return known

    def indexed(self) -> dict[str, FileIndex]:
        """Return the files that have been indexed, the newest step first."""
        return {label: self._files[label] for label in self.find_files() if label in self._files}

    def index_all(self) -> Iterator[str]:
        """Index all files, the newest first; yield the label of each."""
        for label, path in self.find_files().items():
            with suppress(OSError):  # a resumed run may have moved it
                self.index(label, path)
                yield label

    def entry(self, entry_id: str) -> tuple[FileIndex, Entry]:
        """Return a trajectory and its file.

        Raises:
            LookupError: If there is none.
        """
        label, _, _ = entry_id.rpartition(":")
        index = self.index(label)
        for entry in index.entries:
            if entry.id == entry_id:
                return index, entry
        raise LookupError(entry_id)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model; None if it is not on this machine."""
        path = (self.config.get("model") or {}).get("path")
        for folder in (path, self.folder / "trained"):
            file = Path(folder, "tokenizer.json") if folder else None
            if file is not None and file.is_file():
                with suppress(Exception):  # the library raises no narrower error
                    return Tokenizer.from_file(str(file))
        return None


def find_differences(configs: list[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, and the value of each.

    The runs' own folders are no difference, and neither are files in them.

    Example:
        >>> find_differences([{"a": {"b": 1}}, {"a": {"b": 2}}])
        [('a.b', ['1', '2'])]
    """
    flat = [_flatten(config) for config in configs]
    keys = sorted({key for leaves in flat for key in leaves})
    rows = [(key, [leaves.get(key, "not set") for leaves in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(config: Mapping[str, Any]) -> dict[str, str]:
    leaves = dict(_leaves(config))
    folder = leaves.get(_FOLDER_KEY, "").strip('"')
    if not folder:
        return leaves
    own = re.compile(rf'(?<="){re.escape(folder)}(?=[/"])')
    return {key: own.sub(f"${{{_FOLDER_KEY}}}", value) for key, value in leaves.items()}


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(tree, ensure_ascii=False, default=str)
