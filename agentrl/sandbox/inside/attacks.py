"""Attacks that every sandbox must stop. They are tried before a run uses a sandbox.

The text of this module runs in a trial sandbox, so it imports the standard library alone.
"""

import ctypes
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_NEW_MOUNTS, _NEW_USER, _CAPABILITY_VERSION = 0x20000, 0x10000000, 0x20080522
_REMOUNT_BIND, _PRIVATE = 32 | 4096, (1 << 18) | 16384
_GET_SECCOMP, _GET_NO_NEW_PRIVILEGES, _FILTERED = 21, 39, 2
_READ_WRITE, _SHARED_ANONYMOUS = 3, 0x21
_PART = 65536
_libc = ctypes.CDLL(None, use_errno=True)


def find_breaches(target: Mapping[str, Any]) -> list[str]:
    """Try every attack; return those that succeeded.

    Args:
        target: A file that every user may read and write (`secret`), a process (`pid` in
            `pid_namespace`) and a `port` outside; the limits of this sandbox (`memory_bytes`,
            `disk_bytes`, `max_processes`, `max_open_files`).
    """
    secret = target["secret"]
    attacks: dict[str, Callable[[], object]] = {
        "read a file of the trainer": lambda: os.open(secret, os.O_RDONLY),
        "write to a file of the trainer": lambda: os.open(secret, os.O_WRONLY),
        "signal the trainer": lambda: _signals(target["pid"], target["pid_namespace"]),
        "connect to a port": lambda: socket.create_connection(("127.0.0.1", target["port"]), 2),
        "change what is mounted": _changes_mounts,
        "make a read-only file system writable": _remounts,
        "keep a capability": _has_capability,
        "run without a filter of system calls": lambda: (
            _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) != _FILTERED
        ),
        "gain privileges from a program": lambda: (
            _libc.prctl(_GET_NO_NEW_PRIVILEGES, 0, 0, 0, 0) != 1
        ),
        "open more files than it may": lambda: _opens_files(target["max_open_files"]),
        "start more processes than it may": lambda: _starts_processes(target["max_processes"]),
        "write more than it may": lambda: _writes(target["disk_bytes"]),
        "use more memory than it may": lambda: len(bytearray(target["memory_bytes"])),
        "use memory that no limit counts": _maps_shared,
        "raise its limits": lambda: _raises_limits(target["max_open_files"]),
        "open a user namespace": lambda: _libc.unshare(_NEW_USER) == 0,
    }
    return [name for name, attack in attacks.items() if _succeeds(attack)]


def _succeeds(attack: Callable[[], object]) -> bool:
    try:
        return attack() is not False
    except (OSError, ValueError, MemoryError):
        return False


def _signals(pid: int, namespace: str) -> bool:
    """In another namespace, the number is that of a process of this sandbox."""
    with suppress(OSError):
        if os.readlink("/proc/self/ns/pid") != namespace:
            return False
    os.kill(pid, 0)
    return True


def _changes_mounts() -> bool:
    _libc.unshare(_NEW_MOUNTS)  # if it succeeds, nothing that follows changes the machine
    return _libc.mount(None, b"/", None, _PRIVATE, None) == 0


def _remounts() -> bool:
    paths = [b"/", b"/usr"]
    with suppress(OSError), open("/proc/self/mounts", "rb") as file:
        paths += [line.split()[1] for line in file]
    return any(_libc.mount(None, path, None, _REMOUNT_BIND, None) == 0 for path in paths)


def _has_capability() -> bool:
    sets = (ctypes.c_uint32 * 6)()
    _libc.capget((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), sets)
    return any(sets)


def _opens_files(limit: int) -> bool:
    opened: list[int] = []
    try:
        while len(opened) <= limit:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


def _starts_processes(limit: int) -> bool:
    started: list[int] = []
    try:
        while len(started) <= 2 * limit:  # some kernels count late
            started.append(os.fork())
            if started[-1] == 0:
                signal.pause()
                os._exit(0)
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return True


def _writes(limit: int) -> bool:
    for number in range(limit // _PART + 1):
        with open(f".trial-{number}", "wb") as file:
            file.write(bytes(_PART))
    return True


def _maps_shared() -> bool:
    _libc.mmap.restype = ctypes.c_void_p
    mapped = _libc.mmap(None, ctypes.c_size_t(_PART), _READ_WRITE, _SHARED_ANONYMOUS, -1, 0)
    return mapped != ctypes.c_void_p(-1).value


def _raises_limits(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * limit, 2 * limit))
