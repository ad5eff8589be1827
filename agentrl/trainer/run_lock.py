"""The lock of a run's folder: one run at a time writes there.

The lock is `flock` on `run.lock`, which the kernel gives back when the process ends, however it
ends. The file's text names the owner, for the message that a second run shows. The text is removed
when the run ends; text without a lock is what a killed run left.
"""

import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Self

import psutil

from agentrl.errors import ConfigError
from agentrl.files import naming

LOCK_FILE = "run.lock"
_HELD_BY_ANOTHER = frozenset({errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that holds a lock, as it wrote itself into the file."""

    host: str
    process: int
    started: str
    """Local time, to the second."""
    process_started: float
    """When the system started the process: another process may get the same number later."""

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
        """Read the owner; None if the file is empty or is not readable as one."""
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

    def take(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: if another run uses the folder, with its host, process and start time.
            OSError: if the folder cannot be written.
        """
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
        try:
            is_exclusive = _lock(file)
            owner = Owner.read(file)
            if not is_exclusive or (owner is not None and not _is_left_over(owner, file)):
                raise _refusal(owner, self._path, is_locked=not is_exclusive)
            file.truncate(0)
            file.write(json.dumps(asdict(Owner.this_process())) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def release(self) -> None:
        """Give the lock back; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.truncate(0)

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self.take()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _lock(file: IO[str]) -> bool:
    """Lock the file without waiting; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _is_left_over(owner: Owner, file: IO[str]) -> bool:
    """Whether the file's text is of a run that was killed.

    The lock proves that no process of this host is alive behind the text. It does not prove it for
    another host: some network file systems lock for each host apart.
    """
    return owner.is_here and (owner.has_ended() or owner.process == os.getpid())


def _refusal(owner: Owner | None, path: Path, *, is_locked: bool) -> ConfigError:
    if owner is None:
        return ConfigError(
            f"another run uses {path.parent}",
            key="trainer.default_local_dir",
            expected="another folder, or to wait until that run has ended",
        )
    expected = "another folder, or to wait until that run has ended"
    what = "another run uses"
    if is_locked and owner.is_here and owner.has_ended():
        what = "a run that was killed left a child process that still holds"
        expected = f"to end the processes that `fuser {path}` lists"
    elif not is_locked:
        what = "a run on another host uses, or was killed while it used,"
        expected = f"another folder; if that process no longer runs there: delete {path}"
    return ConfigError(
        f"{what} {path.parent}",
        host=owner.host,
        process=owner.process,
        started=owner.started,
        key="trainer.default_local_dir",
        expected=expected,
    )
