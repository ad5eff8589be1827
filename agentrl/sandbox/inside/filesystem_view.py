"""Where the code of a sandbox finds its folder, and what it may read beside the system."""

import os
import stat
from dataclasses import dataclass

import kernel

SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SEEN = ("/usr", "/etc", "/dev", "/proc", "/tmp", "/mnt", *SYSTEM_LINKS)


@dataclass(frozen=True)
class Room:
    """The part of the machine's files that one sandbox is given."""

    folder: str
    """Where the code may write."""
    environment: list[str]
    """Where the folders of Python lie: the interpreter's, the guest's, those of packages."""
    is_mounted: bool
    """Whether the folder is a file system of its own, in memory and of bounded size."""


def make_room(environment: list[str], user: int | None, size_bytes: int) -> Room:
    """Mount a folder over /tmp, and what the code may read on /mnt, unseen by everybody else.

    Done in the process that becomes the provider, in the inner namespaces; what is mounted goes
    with its last process.

    Args:
        environment: Folders of Python.
        user: Whom the folder belongs to; None: this one.
        size_bytes: Of the folder.

    Raises:
        OSError: as the kernel refuses.
    """
    owner = os.geteuid() if user is None else user
    kernel.mount_memory("/mnt", size_bytes=1024**2, user=owner)
    seen = [_shown(path, f"/mnt/{number}") for number, path in enumerate(environment)]
    kernel.make_read_only("/mnt")
    kernel.mount_memory("/tmp", size_bytes=size_bytes, user=owner)
    kernel.bind("/tmp", "/dev/shm")
    _hide_the_rest(owner)
    return Room("/tmp", seen, is_mounted=True)


def find_closed(environment: list[str]) -> str | None:
    """Find a folder that root alone may enter; where nothing is mounted, code cannot see it."""
    return next((path for path in environment if not _is_open(path)), None)


def is_system(path: str) -> bool:
    """Whether a folder is the system's, which every sandbox sees where it is."""
    return path == "/usr" or path.startswith("/usr/")


def _shown(path: str, place: str) -> str:
    if is_system(path):
        return path
    os.mkdir(place, 0o755)
    kernel.bind(path, place)
    kernel.make_read_only(place)
    return place


def _hide_the_rest(owner: int) -> None:
    """Mount nothing over what the code need not see: Landlock refuses to open, not to look."""
    for name in os.listdir("/"):
        path = f"/{name}"
        if path not in _SEEN and os.path.isdir(path) and not os.path.islink(path):
            kernel.mount_memory(path, size_bytes=4096, user=owner)
            kernel.make_read_only(path)


def _is_open(path: str) -> bool:
    """Whether everybody may go down to a folder."""
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        path = os.path.dirname(path)
    return True
