"""Users and machines on which sandlock behaves differently; each function makes this process one.

Run: python -m tests.fakes.user_modes MODE CODE, which runs the Python code CODE in that mode.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable

NO_ENTRY = 1_999_999_999
"""A user without an entry in the password file, as containers have them."""
_CLONE, _UNSHARE, _NEW_USER = 56, 272, 0x10000000
_SET_SECCOMP, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES, _SYS_ADMIN = 22, 24, 38, 21
_libc = ctypes.CDLL(None, use_errno=True)


def become_user() -> None:
    """Be a user who is not root and may open a user namespace."""
    os.setgroups([])
    os.setresgid(*[NO_ENTRY] * 3)
    os.setresuid(*[NO_ENTRY] * 3)


def become_user_with_covered_processes() -> None:
    """Be a user who is not root, in a container that covers parts of /proc."""
    private, new_mounts = (1 << 18) | 16384, 0x20000
    _check(_libc.unshare(new_mounts), "unshare")
    _check(_libc.mount(b"none", b"/", None, private, None), "mount /")
    _check(_libc.mount(b"none", b"/proc/irq", b"tmpfs", 0, None), "mount /proc/irq")
    become_user()


def become_user_without_namespaces() -> None:
    """Be a user who is not root, on a machine that refuses namespaces."""
    become_user()
    _prctl(_NO_NEW_PRIVILEGES, 1)
    refuse, allow = 0x00050001, 0x7FFF0000
    statements = [
        (0x20, 0, 0, 0),  # load the call's number
        (0x15, 0, 1, _UNSHARE),
        (0x06, 0, 0, refuse),
        (0x15, 0, 4, _CLONE),
        (0x20, 0, 0, 16),  # load its flags
        (0x54, 0, 0, _NEW_USER),
        (0x15, 1, 0, 0),
        (0x06, 0, 0, refuse),
        (0x06, 0, 0, allow),
    ]
    data = b"".join(struct.pack("<HBBI", *each) for each in statements)
    program = ctypes.create_string_buffer(data)
    _prctl(_SET_SECCOMP, 2, struct.pack("HP", len(statements), ctypes.addressof(program)))


def become_root_without_namespaces() -> None:
    """Be root in an ordinary container: without the capability to mount, from the next program."""
    _prctl(_DROP_CAPABILITY, _SYS_ADMIN)


MODES: dict[str, Callable[[], None]] = {
    "user": become_user,
    "user with covered /proc": become_user_with_covered_processes,
    "user without namespaces": become_user_without_namespaces,
    "root without namespaces": become_root_without_namespaces,
}


def _prctl(option: int, value: int, data: bytes | int = 0) -> None:
    _check(_libc.prctl(option, value, data, 0, 0), f"prctl {option}")


def _check(done: int, what: str) -> None:
    if done != 0:
        raise OSError(ctypes.get_errno(), what)


if __name__ == "__main__":
    MODES[sys.argv[1]]()
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
