"""The keeper's folders on the disk: nobody else's are taken, and all are deleted."""

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress

_YOUNG_S = 5.0
"""A folder that nobody holds may be one whose keeper has only just made it."""


def make_base(path: str, mode: int) -> None:
    """Make a folder, or find that it is ours: in a common /tmp somebody may have been faster.

    Raises:
        FileExistsError: where it is another's, or no folder.
    """
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise
    os.chmod(path, mode)


def hold(path: str) -> int:
    """Say that a folder is in use, for as long as any process has this descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def sweep(base: str) -> None:
    """Delete the folders that no process holds: their keepers are no more."""
    for name in os.listdir(base):
        with suppress(OSError):  # held, or another keeper is faster
            _sweep_one(os.path.join(base, name))


def _sweep_one(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(descriptor).st_ctime > _YOUNG_S:
            delete(path)
    finally:
        os.close(descriptor)


def delete(path: str) -> None:
    """Delete a folder, whatever code did to its modes; a link is never followed."""
    for folder, names, _ in os.walk(path):
        for name in names:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                with suppress(FileNotFoundError):
                    os.chmod(inner, 0o700)
    shutil.rmtree(path, ignore_errors=True)
