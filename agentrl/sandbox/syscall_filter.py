"""A seccomp filter inside the providers' walls: what those leave open, the kernel refuses.

Namespaces hide files, processes and networks. They leave the rest of the kernel's interfaces within
reach: those that have let programs out before (io_uring, userfaultfd, keyrings, bpf), those that
ask for namespaces and mounts, and sockets of families that no namespace confines (vsock reaches
the host of a virtual machine). Python, compilers and shells need none of them.

And no limit counts memory that is no process's: files without a name, System V's objects, pages
lent to a pipe, and what is mapped shared and anonymous, which stays whole while one page of it is
mapped. So there is none of these either; files in the private folder can be mapped shared.

The filter is classic BPF as `seccomp(2)` describes it: statements of 8 bytes over the record
`struct seccomp_data`.
"""

import errno
import platform
import struct
from typing import NamedTuple

from agentrl.errors import SandboxError

_LOAD, _AND, _JUMP_EQUAL, _JUMP_ATLEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT, _AT_FOURTH_ARGUMENT = 0, 4, 16, 40
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020080
"""The flags of `clone` that ask for a namespace, that of time included."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, netlink: what the network namespace confines."""
_SHARED_ANONYMOUS = 0x21
"""The flags of `mmap` that ask for memory of no file and more than one process."""
_X32 = 0x40000000


class _Machine(NamedTuple):
    architecture: int
    """Of the audit interface."""
    socket: int
    clone: int
    mmap: int
    refused: tuple[int, ...]


_EVERYWHERE = (
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fs*, mount_setattr
    *(438, 440, 447),  # pidfd_getfd, process_madvise, memfd_secret
)
_MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E,
        socket=41,
        clone=56,
        mmap=9,
        refused=(
            *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
            *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount2, unshare, setns
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(298, 321, 323),  # perf_event_open, bpf, userfaultfd
            *(303, 304, 300),  # name_to_handle_at, open_by_handle_at, fanotify_init
            *(319, 278),  # memfd_create, vmsplice
            *(29, 64, 68),  # shmget, semget, msgget
            *(175, 176, 313, 246, 320),  # modules and kexec
            *(103, 154, 163, 167, 168, 169, 172, 173, 179),  # syslog ... ioperm, quotactl
        ),
    ),
    "aarch64": _Machine(
        architecture=0xC00000B7,
        socket=198,
        clone=220,
        mmap=222,
        refused=(
            *(117, 270, 271, 272),
            *(41, 51, 40, 39, 97, 268),
            *(217, 218, 219),
            *(241, 280, 282),
            *(264, 265, 262),
            *(279, 75),
            *(194, 190, 186),
            *(105, 106, 273, 104, 294),
            *(116, 89, 224, 225, 142, 60),
        ),
    ),
}
_CLONE3 = 435
"""Its flags lie in memory, where no filter looks: as if there were none, the C library falls back
to `clone`."""


def syscall_filter(machine: str | None = None) -> bytes:
    """Make the filter for a machine; None: this one.

    Raises:
        SandboxError: where the numbers of its system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(
            f"no filter of system calls for {machine}", expected=" or ".join(_MACHINES)
        )
    return b"".join(_statements(_MACHINES[machine]))


def _statements(machine: _Machine) -> list[bytes]:
    refuse = _statement(_RETURN, _REFUSE | errno.EPERM)
    statements = [
        _statement(_LOAD, _AT_ARCHITECTURE),
        _statement(_JUMP_EQUAL, machine.architecture, then=1),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _AT_NUMBER),
        *_if(_JUMP_ATLEAST, _X32, [refuse]),
        *_if(_JUMP_EQUAL, _CLONE3, [_statement(_RETURN, _REFUSE | errno.ENOSYS)]),
    ]
    for number in (*machine.refused, *_EVERYWHERE):
        statements += _if(_JUMP_EQUAL, number, [refuse])
    allow = _statement(_RETURN, _ALLOW)
    families = [part for each in _SOCKET_FAMILIES for part in _if(_JUMP_EQUAL, each, [allow])]
    no_family = _statement(_RETURN, _REFUSE | errno.EAFNOSUPPORT)
    flags = [_statement(_LOAD, _AT_FIRST_ARGUMENT), _statement(_AND, _NEW_NAMESPACES)]
    mapped = [_statement(_LOAD, _AT_FOURTH_ARGUMENT), _statement(_AND, _SHARED_ANONYMOUS)]
    return [
        *statements,
        *_if(_JUMP_EQUAL, machine.socket, [flags[0], *families, no_family]),
        *_if(
            _JUMP_EQUAL,
            machine.mmap,
            [*mapped, *_if(_JUMP_EQUAL, _SHARED_ANONYMOUS, [refuse]), allow],
        ),
        *_if(_JUMP_EQUAL, machine.clone, [*flags, *_if(_JUMP_EQUAL, 0, [allow]), refuse]),
        allow,
    ]


def _if(code: int, value: int, body: list[bytes]) -> list[bytes]:
    """Do the body where the comparison holds, and skip it elsewhere."""
    return [_statement(code, value, is_not=len(body)), *body]


def _statement(code: int, value: int, *, then: int = 0, is_not: int = 0) -> bytes:
    """Pack one statement; `then` and `is_not` say how many a jump skips."""
    return struct.pack("<HBBI", code, then, is_not, value)
