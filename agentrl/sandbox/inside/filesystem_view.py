"""The files that a sandbox sees: its private folder, Python, and the system's programs."""

import os
import stat
from dataclasses import dataclass

import kernel

SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_VISIBLE = ("/usr", "/etc", "/dev", "/proc", "/tmp", "/mnt", *SYSTEM_LINKS)


@dataclass(frozen=True)
class FilesystemView:
    """The part of the machine's files that one sandbox sees."""

    folder: str
    """The private folder, the only one that the code can write to."""
    environment: list[str]
    """Folders of Python: the interpreter, the guest's scripts, installed packages."""
    readable: dict[str, str]
    """Further files and folders, each by the path at which the code finds it."""
    is_mounted: bool
    """Whether the folder is a file system of its own, in memory and of bounded size."""


def mount_view(
    environment: list[str], readable: dict[str, str], user: int | None, size_bytes: int
) -> FilesystemView:
    """Mount a private folder over /tmp and what the code may read under /mnt.

    Call it in the process that becomes the provider, in the inner namespaces. No other process sees
    the mounts, and they end with the last process of the sandbox.

    Args:
        environment: Folders of Python.
        readable: Further files and folders by the path at which the code finds them.
        user: Owner of the folder; None for the current user.
        size_bytes: Size of the folder.

    Raises:
        OSError: If the kernel refuses.
    """
    owner = os.geteuid() if user is None else user
    kernel.mount_memory("/mnt", size_bytes=1024**2, user=owner)
    paths = [*environment, *readable.values()]
    visible = [_bind_read_only(path, f"/mnt/{i}") for i, path in enumerate(paths)]
    kernel.make_read_only("/mnt")
    kernel.mount_memory("/tmp", size_bytes=size_bytes, user=owner)
    kernel.bind("/tmp", "/dev/shm")
    # Cover what the code need not see: Landlock refuses to open a file, not to look it up.
    for path in (f"/{name}" for name in os.listdir("/")):
        if path not in _VISIBLE and os.path.isdir(path) and not os.path.islink(path):
            kernel.mount_memory(path, size_bytes=4096, user=owner)
            kernel.make_read_only(path)
    count = len(environment)
    further = dict(zip(readable, visible[count:], strict=True))
    return FilesystemView("/tmp", visible[:count], further, is_mounted=True)


def is_system(path: str) -> bool:
    """Whether a folder belongs to the system, which every sandbox sees at its own path."""
    return path == "/usr" or path.startswith("/usr/")


def _bind_read_only(path: str, target: str) -> str:
    if is_system(path):
        return path
    if os.path.isdir(path):
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))
    kernel.bind(path, target)
    kernel.make_read_only(target)
    return target


def find_closed_folder(environment: list[str]) -> str | None:
    """Find a folder that only root can enter. Without mounts, the code cannot see such a folder."""
    return next((path for path in environment if not _is_open(path)), None)


def _is_open(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        path = os.path.dirname(path)
    return True
