"""The namespaces of one sandbox: the warden enters the outer ones, its child the inner ones.

The PID namespace can be missing alone: inside many containers /proc cannot be mounted again, since
parts of it are covered, and without its own /proc a PID namespace is of no use.
"""

import os
from typing import NoReturn

import kernel

_ENTERED = b"entered"

# What sandlock keeps for each user in System V's shared memory would outlive the sandbox.
_INNER = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


def why_no_namespaces(*, has_pids: bool) -> str | None:
    """Try to enter the namespaces, in processes that end at once.

    Args:
        has_pids: Whether a PID namespace is one of them.

    Returns:
        Why this user may not have them; None: the user may.
    """
    told, far_told = os.pipe()
    if os.fork() == 0:
        _try(far_told, has_pids=has_pids)
    os.close(far_told)
    with open(told, "rb") as file:
        found = file.read()
    return None if found == _ENTERED else found.decode() or "the trial ended early"


def _try(told: int, *, has_pids: bool) -> NoReturn:
    try:
        enter_outer(has_pids=has_pids)
        if os.fork() == 0:
            enter_inner(has_pids=has_pids)
            os.write(told, _ENTERED)
    except OSError as error:
        os.write(told, str(error).encode())
    finally:
        os._exit(0)


def enter_outer(*, has_pids: bool) -> None:
    """Have a PID namespace for the next child, and as a user who is not root a user namespace.

    The child is the PID namespace's first process: when it ends, the kernel kills all the others.

    Raises:
        OSError: as the kernel refuses.
    """
    me = os.geteuid(), os.getegid()
    pids = kernel.CLONE_NEWPID if has_pids else 0
    if me[0] == 0:
        kernel.unshare(pids)
        return
    kernel.unshare(pids | kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{me[0]} {me[0]} 1"),
        ("gid_map", f"{me[1]} {me[1]} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_inner(*, has_pids: bool) -> None:
    """Have mounts, processes, networks and System V's objects that no other process sees.

    Raises:
        OSError: as the kernel refuses.
    """
    kernel.unshare(_INNER)
    kernel.hide_mounts()
    if has_pids:
        kernel.mount_processes("/proc")
