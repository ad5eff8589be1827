"""The spawners' folders on the disk: each has a random name, and all of them are deleted."""

import fcntl
import os
import stat
import time
from contextlib import suppress

_MIN_AGE_S = 5.0
"""A younger folder may belong to a spawner that has made it and not yet locked it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_ANY_MODE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def random_name() -> str:
    """Make a name that no other user can take first and that no code can guess."""
    return os.urandom(16).hex()


def make_folder(prefix: str, mode: int) -> str:
    """Make a folder with a random name and exactly this mode; return its path."""
    path = prefix + random_name()
    os.mkdir(path, mode)
    os.chmod(path, mode)  # the umask does not apply here
    return path


def lock(path: str) -> int:
    """Mark a folder as in use for as long as any process has the returned descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def delete_abandoned(prefix: str) -> None:
    """Delete this user's folders of this prefix that no process has locked: their owners are dead.

    A folder that cannot be deleted stays and raises nothing.
    """
    parent, start = os.path.split(prefix)
    for name in os.listdir(parent):
        if name.startswith(start):
            with suppress(Exception):  # it is locked, already deleted, or broken
                _delete_if_unlocked(os.path.join(parent, name))


def _delete_if_unlocked(path: str) -> None:
    descriptor = os.open(path, _FOLDER)
    try:
        found = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _MIN_AGE_S:
            delete(path)
    finally:
        os.close(descriptor)


def delete(path: str) -> None:
    """Delete a folder of any depth and with any modes. Links are never followed.

    The folders of a folder move to the top before it is deleted. So the depth is not bounded by
    recursion, by the length of a path, or by the number of descriptors.

    Raises:
        OSError: If something in it cannot be deleted. The rest is deleted.
    """
    top = _open(path, None)
    try:
        stuck: set[str] = set()
        while names := set(os.listdir(top)) - stuck:
            stuck |= {name for name in names if not _delete_or_flatten(name, top)}
    finally:
        os.close(top)
    os.rmdir(path)


def _delete_or_flatten(name: str, top: int) -> bool:
    """Delete an entry of the top; move its folders to the top. Return whether it is deleted."""
    try:
        if not _is_folder(name, top):
            os.unlink(name, dir_fd=top)
            return True
        inner = _open(name, top)
        try:
            for each in os.listdir(inner):
                with suppress(OSError):  # then its folder is not empty
                    if _is_folder(each, inner):
                        os.close(_open(each, inner))  # to move a folder is to write to it
                        os.rename(each, random_name(), src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(each, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    return True


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _open(name: str, parent: int | None) -> int:
    """Open a folder after giving this user every right to it."""
    descriptor = os.open(name, _ANY_MODE, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(descriptor)
