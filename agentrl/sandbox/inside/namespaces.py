"""The namespaces of one sandbox: the supervisor enters the outer ones, its child the inner ones.

The PID namespace can be missing alone. Many containers cover parts of /proc, and then /proc cannot
be mounted again; without its own /proc a PID namespace is useless.
"""

import os
from typing import NoReturn

import kernel

_ENTERED = b"entered"
# sandlock keeps objects in System V's shared memory for each user. They would outlive the sandbox.
_INNER = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


def find_namespace_error(*, has_pids: bool) -> str | None:
    """Try to enter the namespaces, in processes that end at once.

    Args:
        has_pids: Whether a PID namespace is one of them.

    Returns:
        Why this user cannot have them; None if the user can.
    """
    result, far_result = os.pipe()
    if os.fork() == 0:
        _try_namespaces(far_result, has_pids=has_pids)
    os.close(far_result)
    with open(result, "rb") as file:
        found = file.read()
    return None if found == _ENTERED else found.decode() or "the trial ended early"


def _try_namespaces(result: int, *, has_pids: bool) -> NoReturn:
    try:
        enter_outer(has_pids=has_pids)
        if os.fork() == 0:
            enter_inner(has_pids=has_pids)
            os.write(result, _ENTERED)
    except OSError as error:
        os.write(result, str(error).encode())
    finally:
        os._exit(0)


def enter_outer(*, has_pids: bool) -> None:
    """Create a PID namespace for the next child and, unless root, a user namespace.

    The child is the first process of the PID namespace: when it ends, the kernel kills all others.

    Raises:
        OSError: If the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    pids = kernel.CLONE_NEWPID if has_pids else 0
    if user == 0:
        kernel.unshare(pids)
        return
    kernel.unshare(pids | kernel.CLONE_NEWUSER)
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_inner(*, has_pids: bool) -> None:
    """Create mounts, processes, networks and System V objects that no other process sees.

    Raises:
        OSError: If the kernel refuses.
    """
    kernel.unshare(_INNER)
    kernel.hide_mounts()
    if has_pids:
        kernel.mount_processes("/proc")
