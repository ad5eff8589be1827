"""System calls that Python does not offer."""

import ctypes
import os
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PR_SET_SECCOMP, _MODE_FILTER, _STATEMENT_BYTES = 22, 2, 8
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_IPC_RMID = 0
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
    _libc.prctl(option, value, 0, 0, 0)


def filter_system_calls(program: bytes) -> None:
    """Install a seccomp filter for this process and everything that it starts.

    Raises:
        OSError: If the kernel refuses.
    """
    statements = ctypes.create_string_buffer(program)
    record = struct.pack("HP", len(program) // _STATEMENT_BYTES, ctypes.addressof(statements))
    _check(_libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, record, 0, 0), "seccomp")


def unshare(flags: int) -> None:
    """Enter new namespaces.

    Raises:
        OSError: If the kernel refuses.
    """
    _check(_libc.unshare(flags), "unshare")


def hide_mounts() -> None:
    """Make later mounts of this namespace invisible to every other one."""
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")


def mount_memory(path: str, *, size_bytes: int, user: int) -> None:
    """Mount a file system in memory, of bounded size and number of files."""
    options = f"size={size_bytes},nr_inodes={max(1024, size_bytes // 4096)},mode=700,uid={user}"
    flags = _MS_NOSUID | _MS_NODEV
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()), f"mount {path}")


def mount_processes(path: str) -> None:
    """Mount a /proc that shows the processes of this PID namespace only."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(_libc.mount(b"proc", path.encode(), b"proc", flags, None), f"mount {path}")


def remove_shared_objects(user: int) -> None:
    """Remove a user's System V semaphores and shared memory. Call it as this user."""
    for identifier in _shared_objects("shm", user):
        _libc.shmctl(identifier, _IPC_RMID, None)
    for identifier in _shared_objects("sem", user):
        _libc.semctl(identifier, 0, _IPC_RMID)


def _shared_objects(kind: str, user: int) -> list[int]:
    with open(f"/proc/sysvipc/{kind}") as file:
        names, *rows = [line.split() for line in file]
    own, identifier = names.index("uid"), names.index(f"{kind}id")
    return [int(row[identifier]) for row in rows if int(row[own]) == user]


def make_read_only(path: str) -> None:
    """Make a mount read-only."""
    flags = _MS_REMOUNT | _MS_RDONLY | _MS_BIND
    _check(_libc.mount(None, path.encode(), None, flags, None), f"mount {path} read-only")


def bind(path: str, target: str) -> None:
    """Mount a folder at a second path."""
    flags = _MS_BIND | _MS_REC
    _check(_libc.mount(path.encode(), target.encode(), None, flags, None), f"bind {path}")


def _check(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
