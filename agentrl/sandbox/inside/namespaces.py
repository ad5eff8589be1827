"""The namespaces of one sandbox: the warden enters the outer ones, its child the inner ones."""

import os
from typing import NoReturn

import kernel

_ENTERED = b"entered"

# What sandlock keeps for each user in System V's shared memory would outlive the sandbox.
_INNER = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


def why_no_namespaces() -> str | None:
    """Try to enter the namespaces, in processes that end at once.

    Returns:
        Why this user may not have them; None: the user may.
    """
    told, far_told = os.pipe()
    if os.fork() == 0:
        _try(far_told)
    os.close(far_told)
    with open(told, "rb") as file:
        found = file.read()
    return None if found == _ENTERED else found.decode() or "the trial ended early"


def _try(told: int) -> NoReturn:
    try:
        enter_outer()
        if os.fork() == 0:
            enter_inner()
            os.write(told, _ENTERED)
    except OSError as error:
        os.write(told, str(error).encode())
    finally:
        os._exit(0)


def enter_outer() -> None:
    """Have a PID namespace for the next child, and as a user who is not root a user namespace.

    The child is the namespace's first process: when it ends, the kernel kills all the others.

    Raises:
        OSError: as the kernel refuses.
    """
    me = os.geteuid(), os.getegid()
    if me[0] == 0:
        kernel.unshare(kernel.CLONE_NEWPID)
        return
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{me[0]} {me[0]} 1"),
        ("gid_map", f"{me[1]} {me[1]} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_inner() -> None:
    """Have mounts, processes, networks and System V's objects that no other process sees.

    Raises:
        OSError: as the kernel refuses.
    """
    kernel.unshare(_INNER)
    kernel.hide_mounts()
    kernel.mount_processes("/proc")
