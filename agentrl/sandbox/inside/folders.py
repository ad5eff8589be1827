"""The keepers' folders on the disk: each has a random name, and all are deleted."""

import fcntl
import os
import stat
import time
from contextlib import suppress

_YOUNG_S = 5.0
"""A folder that nobody holds may be one whose keeper has only just made it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ANY_MODE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def random_name() -> str:
    """Make a name that no other user can take first, and that no code can guess."""
    return os.urandom(16).hex()


def make_folder(beginning: str, mode: int) -> str:
    """Make a folder of a random name.

    Args:
        beginning: Of its path.
        mode: Its mode, whatever the umask.

    Returns:
        Its path.
    """
    path = beginning + random_name()
    os.mkdir(path, mode)
    os.chmod(path, mode)
    return path


def hold(path: str) -> int:
    """Say that a folder is in use, for as long as any process has this descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def sweep(beginning: str) -> None:
    """Delete this user's folders of a beginning that no process holds: their keepers are dead.

    A folder that cannot be deleted stays, and prevents nothing.
    """
    at, start = os.path.split(beginning)
    for name in os.listdir(at):
        if name.startswith(start):
            with suppress(Exception):  # held, or another keeper is faster, or it is broken
                _sweep_one(os.path.join(at, name))


def _sweep_one(path: str) -> None:
    descriptor = os.open(path, _FOLDER)
    try:
        found = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _YOUNG_S:
            delete(path)
    finally:
        os.close(descriptor)


def delete(path: str) -> None:
    """Delete a folder, however deep it is and whatever its modes; a link is never followed.

    A folder's own folders are moved to the top before it is deleted. So neither recursion nor the
    length of a path nor the number of descriptors bounds the depth.

    Raises:
        OSError: where something in it cannot be deleted; the rest is.
    """
    top = _open(path, None)
    try:
        stuck: set[str] = set()
        while names := set(os.listdir(top)) - stuck:
            stuck |= {name for name in names if not _is_deleted(name, top)}
    finally:
        os.close(top)
    os.rmdir(path)


def _is_deleted(name: str, top: int) -> bool:
    """Delete a file or folder at the top, whose folders move to the top."""
    try:
        if not _is_folder(name, top):
            os.unlink(name, dir_fd=top)
            return True
        inner = _open(name, top)
        try:
            for each in os.listdir(inner):
                with suppress(OSError):  # then its folder is not empty
                    _delete_or_move(each, inner, top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    return True


def _delete_or_move(name: str, inner: int, top: int) -> None:
    if not _is_folder(name, inner):
        os.unlink(name, dir_fd=inner)
        return
    os.close(_open(name, inner))  # who moves a folder writes to it
    os.rename(name, random_name(), src_dir_fd=inner, dst_dir_fd=top)


def _is_folder(name: str, at: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)


def _open(name: str, at: int | None) -> int:
    """Open a folder, and make it this user's to change."""
    descriptor = os.open(name, _ANY_MODE, dir_fd=at)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(descriptor)
