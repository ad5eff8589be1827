"""A run's folder: its lock, and the records of the run's starts.

The lock is `flock` on `run.lock`; the kernel releases it when the process ends. The file's text
names the owner, for the message that a second run shows. The text is removed when the run ends.
Text without a lock means that the run was killed.

Some network file systems lock for each host separately. The owner therefore touches the file every
few seconds, and a run on another host takes over only if the file is not touched for a while.
"""

import errno
import fcntl
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any, Self, cast

import psutil
import yaml

import agentrl
from agentrl.atomic_io import atomic_file, naming_path
from agentrl.cluster.run_status import STATUS_FILE
from agentrl.config.inputs import with_absolute_inputs
from agentrl.config.schema.run import RunConfig
from agentrl.config.secrets import REDACTED, is_secret_name, without_secrets
from agentrl.errors import ConfigError
from agentrl.plugins.environment import num_cores
from agentrl.trainer.metrics.sinks import METRICS_FILE

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
START_FILE = "started"
"""Holds the start date of a run, which its templates write."""
TOUCH_S = 5.0
"""Seconds between two touches of the file by its owner."""
SILENCE_S = 60.0
"""Seconds without a touch after which an owner on another host counts as ended. Network file
systems may show a touch many seconds later."""
_HELD_BY_ANOTHER = frozenset({errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that holds a lock; the text of the lock file."""

    host: str
    process: int
    started: str
    """Local time, to the second."""
    process_started: float
    """Start time of the process: another process may get the same number later."""

    @classmethod
    def this_process(cls) -> Self:
        """Describe this process."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            started=datetime.now().isoformat(sep=" ", timespec="seconds"),
            process_started=psutil.Process().create_time(),
        )

    @classmethod
    def read(cls, file: IO[str]) -> Self | None:
        """Read the owner; None if the file is empty or damaged."""
        file.seek(0)
        try:
            return cls(**json.load(file))
        except (ValueError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether the owner is on this host."""
        return self.host == socket.gethostname()

    def has_ended(self) -> bool:
        """Whether the owner, a process of this host, no longer runs."""
        try:
            return abs(psutil.Process(self.process).create_time() - self.process_started) > 1
        except psutil.Error:
            return True


class RunLock:
    """A lock on a run's folder. The operating system releases it when the process ends.

    Example:
        >>> with RunLock(Path("runs/x")):
        ...     train()
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def take(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: if another run uses the folder, with its host, process and start time.
            OSError: if the folder cannot be written.
        """
        with naming_path(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
        try:
            is_locked = _try_lock(file)
            owner = Owner.read(file)
            if not is_locked or (owner is not None and not _has_ended(owner, self._path)):
                raise _in_use_error(owner, self._path)
            file.truncate(0)
            file.write(json.dumps(asdict(Owner.this_process())) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file, self._ended = file, threading.Event()
        touching = (self._path, self._ended)  # not `self`: the thread must not keep it alive
        threading.Thread(target=_touch, args=touching, name="agentrl-lock", daemon=True).start()
        return self

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            self._ended.set()
            with file:
                file.truncate(0)

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self.take()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _try_lock(file: IO[str]) -> bool:
    """Lock the file without waiting; return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _touch(path: Path, ended: threading.Event) -> None:
    """Touch the file until the lock is released."""
    while not ended.wait(TOUCH_S):
        with suppress(OSError):
            os.utime(path)


def _has_ended(owner: Owner, path: Path) -> bool:
    """Return whether the run that wrote the file has ended, although the text is still there.

    For an owner on this host, the lock of the kernel is proof. For an owner on another host it is
    not, so this waits for a touch of the file.
    """
    if owner.is_here:
        return owner.has_ended() or owner.process == os.getpid()
    logger.warning(
        "%s belongs to process %d on host %s: waiting %.0f s to see if it is alive",
        *(path, owner.process, owner.host, SILENCE_S),
    )
    touched, end = path.stat().st_mtime_ns, time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        time.sleep(min(1.0, SILENCE_S / 10))
        if path.stat().st_mtime_ns != touched:
            return False
    return True


def _in_use_error(owner: Owner | None, path: Path) -> ConfigError:
    what, expected = "another run uses", "another folder, or wait until that run has ended"
    if owner is not None and owner.is_here:
        if owner.process == os.getpid():
            what, expected = "a Trainer of this process uses", "call close() of that Trainer"
        elif owner.has_ended():
            what = "a child process of a killed run still uses"
            expected = f"end the processes that `fuser {path}` lists"
    details = asdict(owner) if owner else {}
    details.pop("process_started", None)
    return ConfigError(
        f"{what} {path.parent}", **details, key="trainer.default_local_dir", expected=expected
    )


STARTED_AS = "started_as"
"""Key of the start's folder in a checkpoint."""
STARTS = "starts"
RESOLVED = "resolved.yaml"
ABOUT = "run.json"
_GIT_TIMEOUT_S = 5


@contextmanager
def removing_failed_start(config: RunConfig, *, is_main: bool) -> Generator[None]:
    """Remove what a start has written to a new run folder, if the `with` block raises.

    Args:
        config: The run's configuration.
        is_main: Whether this is the main rank; only that one removes.
    """
    trainer = config.trainer
    run = trainer.default_local_dir
    folders = (trainer.rollout_data_dir, trainer.validation_data_dir, run)
    new = [folder for folder in folders if folder is not None and not folder.exists()]
    try:
        yield
    except BaseException:
        if run in new and is_main:
            with suppress(OSError):  # a folder with other files is kept
                for name in (LOCK_FILE, START_FILE):
                    (run / name).unlink(missing_ok=True)
                for folder in new:
                    if folder.is_dir() and not any(folder.iterdir()):
                        folder.rmdir()
        raise


RUN_SIGNS = (LOCK_FILE, METRICS_FILE, STARTS, f"logs/{STATUS_FILE}")
"""What the folder of a run has, any of them."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return any((folder / sign).exists() for sign in RUN_SIGNS)


def check_run_folder(folder: Path) -> None:
    """Check that a folder is that of a run.

    Raises:
        ConfigError: if it is not. The error names the runs in it.
    """
    if folder.is_dir() and is_run(folder):
        return
    what = f"{folder} is not the folder of a run" if folder.exists() else f"no folder {folder}"
    inner = [path.name for path in sorted(folder.glob("*")) if is_run(path)]
    raise ConfigError(
        what,
        expected=f"a folder with {', '.join(RUN_SIGNS)}: trainer.default_local_dir of a run",
        runs_in_it=", ".join(inner) or None,
    )


def move_paths(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy a recorded configuration with the paths in the run's folder changed to where it is now.

    Paths that are relative to where the run was started are changed if they are in the folder now.

    Args:
        config: The resolved configuration of a start of the run.
        folder: The run's folder: it may be a copy, or may have been moved.
    """
    recorded = (config.get("trainer") or {}).get("default_local_dir")
    if recorded is None or Path(recorded).resolve() == folder.resolve():
        return dict(config)
    return _move(config, Path(recorded), folder.resolve())


def _move(tree: Any, recorded: Path, run: Path) -> Any:
    if isinstance(tree, Mapping):
        return {key: _move(value, recorded, run) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_move(value, recorded, run) for value in tree]
    if not isinstance(tree, str):
        return tree
    if Path(tree).is_relative_to(recorded):
        return str(run / Path(tree).relative_to(recorded))
    for start in range(1, len(recorded.parts)):
        folder = Path(*recorded.parts[start:])
        if Path(tree).is_relative_to(folder):
            moved = run / Path(tree).relative_to(folder)
            return str(moved) if moved != run and moved.exists() else tree
    return tree


def find_starts(folder: Path) -> list[Path]:
    """Find the folders with the records of a run's starts, in order."""
    return sorted(one for one in (folder / STARTS).glob("[0-9]*") if one.name.isdecimal())


def find_last_start(folder: Path) -> Path | None:
    """Return the folder with the record of a run's last start; None if there is none."""
    return max(find_starts(folder), default=None)


def write_start(folder: Path, config: RunConfig, *, num_ranks: int, resumed_step: int = 0) -> str:
    """Record configuration, command, packages and hardware of a start; only the main rank calls it.

    Args:
        folder: The run's folder.
        config: The run's configuration.
        num_ranks: Processes that train.
        resumed_step: The step that the run resumes from; 0: it begins.

    Returns:
        The record's folder, relative to the run's folder: `starts/0001`.

    Raises:
        OSError: if it cannot be written.
    """
    number = 1 + max((int(path.name) for path in find_starts(folder)), default=0)
    name = f"{STARTS}/{number:04}"
    given = without_secrets(_recorded(config).model_dump(mode="json", exclude_unset=True))
    files = {
        "config.yaml": yaml.safe_dump(given, sort_keys=False),
        RESOLVED: yaml.safe_dump(_resolved(config), sort_keys=False),
        ABOUT: json.dumps(_describe(num_ranks, resumed_step), indent=2) + "\n",
    }
    for file, text in files.items():
        with atomic_file(folder / name / file) as draft:
            draft.write_text(text, encoding="utf-8")
    return name


def changed_keys(start: Path, config: RunConfig) -> list[str]:
    """List the keys with other values than at an earlier start, with both values.

    Args:
        start: The folder of the earlier start.
        config: The configuration of this start.

    Returns:
        A line for each key; no lines if there is no record to compare with.
    """
    try:
        before = yaml.safe_load((start / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    old, new = dict(_leaves(before)), dict(_leaves(_resolved(config)))
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def _resolved(config: RunConfig) -> dict[str, Any]:
    return without_secrets(_recorded(config).model_dump(mode="json"))


def _recorded(config: RunConfig) -> RunConfig:
    """Make the files absolute. Ray's copy of a working directory is removed after the run."""
    is_copied = config.cluster.runtime_env.working_dir is not None
    return config if is_copied else with_absolute_inputs(config)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        yield key, tree
        return
    for name, value in cast("Mapping[str, Any]", tree).items():
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "not set"


def _describe(num_ranks: int, resumed_step: int) -> dict[str, Any]:
    import torch  # here, because `agentrl status` reads the lock without it

    return {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": without_secrets([_redacted(argument) for argument in sys.argv]),
        "directory": os.getcwd(),
        "num_ranks": num_ranks,
        "resumed_step": resumed_step,
        "git": {
            "directory": _git_revision(Path.cwd()),
            "agentrl": _git_revision(Path(agentrl.__file__).parent),
        },
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cores": num_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "accelerators": [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ],
        },
        "python": platform.python_version(),
        "packages": _find_packages(),
    }


@cache
def _find_packages() -> dict[str, str]:
    """Return the version of each installed package; each is a file to parse, so once."""
    found = (package.metadata for package in distributions())
    return dict(sorted({each["Name"]: each["Version"] for each in found}.items()))


def _redacted(argument: str) -> str:
    """Redact secrets in an override, `section.api_key=value` or `section={api_key: value}`."""
    key, equals, value = argument.partition("=")
    if equals and is_secret_name(key.rpartition(".")[2].lstrip("-+")):
        return f"{key}={REDACTED}"
    if value[:1] not in ("{", "["):
        return argument
    try:
        given = yaml.safe_load(value)
        redacted = without_secrets(given)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        return f"{key}={REDACTED}"
    return argument if redacted == given else f"{key}={json.dumps(redacted, default=str)}"


def _git_revision(folder: Path) -> str | None:
    """Return the commit of a folder, with `+changes` if files differ; None outside of git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
