"""A seccomp filter inside the providers' walls: what those leave open, the kernel refuses.

Namespaces hide files, processes and networks, and Landlock refuses to open files and to connect by
TCP. Both leave the rest of the kernel's interfaces open. The filter refuses five kinds of calls:

1. Interfaces that let programs out before (io_uring, userfaultfd, keyrings, bpf), namespaces and
   mounts.
2. Sockets of every family but Unix. Landlock checks `connect` and `bind` of plain TCP only: MPTCP,
   fast open and `listen` without `bind` pass it. The memory of TCP sockets is one budget of the
   whole machine, which no namespace divides.
3. Memory that no limit counts, because it is no process's: files without a name, System V's
   objects, message queues, pages lent to a pipe, shared anonymous mappings (which stay whole while
   one page is mapped), and buffers of sockets and pipes beyond their default size. Files in the
   private folder can be mapped shared.
4. Calls that act on another process of the same user (its limits, priority, processors, memory),
   and on attributes of files, which Landlock does not check.
5. Calls that take a budget of the machine or look past the mounts (`io_setup`, inotify), and every
   call that is newer than Linux 5.13, as if the kernel were older.

Python, compilers and shells need none of them.

The filter is classic BPF as `seccomp(2)` describes it: statements of 8 bytes over the record
`struct seccomp_data`.
"""

import errno
import platform
import struct
from typing import NamedTuple

from agentrl.errors import SandboxError

_LOAD, _AND, _JUMP_EQUAL, _JUMP_ATLEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020080
"""The flags of `clone` that ask for a namespace, that of time included."""
_SHARED_ANONYMOUS = 0x21
"""The flags of `mmap` that ask for memory of no file and more than one process."""
_BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE."""
_SET_PIPE_SIZE = 1031
_UNIX = 1
"""The family of sockets."""
_SELF, _OF_PROCESS, _INPUT_OF_PROCESS = 0, 0, 1
"""The number that names the caller; the kinds of `setpriority` and `ioprio_set` that take it."""
_FIRST_NEW_CALL = 443
"""All architectures count alike from here on; the calls of x32 are above as well."""
_CLONE3 = 435
"""Its flags are in memory, which a filter cannot read: as if there were none, the C library falls
back to `clone`."""


class _Rule(NamedTuple):
    """What one argument of a call must be, or must not be."""

    call: str
    argument: int
    value: int
    is_required: bool = True
    """Whether the argument must be this value; False: it must not."""
    mask: int = 0xFFFFFFFF
    """The bits that are compared. The kernel reads no more than 32 of these arguments."""
    error: int = errno.EPERM


_RULES = (
    _Rule("socket", 0, _UNIX, error=errno.EAFNOSUPPORT),
    _Rule("socketpair", 0, _UNIX, error=errno.EAFNOSUPPORT),
    *(_Rule("setsockopt", 2, option, is_required=False) for option in _BUFFER_SIZES),
    _Rule("fcntl", 1, _SET_PIPE_SIZE, is_required=False),
    _Rule("mmap", 3, _SHARED_ANONYMOUS, is_required=False, mask=_SHARED_ANONYMOUS),
    _Rule("clone", 0, 0, mask=_NEW_NAMESPACES),
    # A process may change its own limits and priority.
    _Rule("prlimit64", 0, _SELF),
    _Rule("sched_setparam", 0, _SELF),
    _Rule("sched_setscheduler", 0, _SELF),
    _Rule("sched_setaffinity", 0, _SELF),
    _Rule("sched_setattr", 0, _SELF),
    _Rule("setpriority", 0, _OF_PROCESS),
    _Rule("setpriority", 1, _SELF),
    _Rule("ioprio_set", 0, _INPUT_OF_PROCESS),
    _Rule("ioprio_set", 1, _SELF),
)


class _Machine(NamedTuple):
    architecture: int
    """Of the audit interface."""
    numbers: dict[str, int]
    """Of the calls that the rules name."""
    refused: tuple[int, ...]
    attributes: tuple[int, ...]
    """The calls that set and remove attributes of files."""


_EVERYWHERE = (
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fs*, mount_setattr
    *(438, 440),  # pidfd_getfd, process_madvise
)
_MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E,
        numbers={
            "socket": 41,
            "socketpair": 53,
            "setsockopt": 54,
            "fcntl": 72,
            "mmap": 9,
            "clone": 56,
            "prlimit64": 302,
            "setpriority": 141,
            "ioprio_set": 251,
            "sched_setparam": 142,
            "sched_setscheduler": 144,
            "sched_setaffinity": 203,
            "sched_setattr": 314,
        },
        refused=(
            *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
            *(256, 279),  # migrate_pages, move_pages
            *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount2, unshare, setns
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(298, 321, 323),  # perf_event_open, bpf, userfaultfd
            *(303, 304, 300),  # name_to_handle_at, open_by_handle_at, fanotify_init
            *(253, 294, 206),  # inotify_init, inotify_init1, io_setup
            *(319, 278),  # memfd_create, vmsplice
            *(29, 64, 68, 240),  # shmget, semget, msgget, mq_open
            *(175, 176, 313, 246, 320),  # modules and kexec
            *(103, 154, 163, 167, 168, 169, 172, 173, 179),  # syslog ... ioperm, quotactl
        ),
        attributes=(188, 189, 190, 197, 198, 199),
    ),
    "aarch64": _Machine(
        architecture=0xC00000B7,
        numbers={
            "socket": 198,
            "socketpair": 199,
            "setsockopt": 208,
            "fcntl": 25,
            "mmap": 222,
            "clone": 220,
            "prlimit64": 261,
            "setpriority": 140,
            "ioprio_set": 30,
            "sched_setparam": 118,
            "sched_setscheduler": 119,
            "sched_setaffinity": 122,
            "sched_setattr": 274,
        },
        refused=(
            *(117, 270, 271, 272),
            *(238, 239),
            *(41, 51, 40, 39, 97, 268),
            *(217, 218, 219),
            *(241, 280, 282),
            *(264, 265, 262),
            *(26, 0),
            *(279, 75),
            *(194, 190, 186, 180),
            *(105, 106, 273, 104, 294),
            *(116, 89, 224, 225, 142, 60),
        ),
        attributes=(5, 6, 7, 14, 15, 16),
    ),
}


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
    statements = [
        _statement(_LOAD, _AT_ARCHITECTURE),
        _statement(_JUMP_EQUAL, machine.architecture, then=1),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _AT_NUMBER),
        *_if(_JUMP_ATLEAST, _FIRST_NEW_CALL, [_refuse(errno.ENOSYS)]),
        *_if(_JUMP_EQUAL, _CLONE3, [_refuse(errno.ENOSYS)]),
    ]
    for number in (*machine.refused, *_EVERYWHERE):
        statements += _if(_JUMP_EQUAL, number, [_refuse(errno.EPERM)])
    for number in machine.attributes:  # as on file systems that have none: programs expect this
        statements += _if(_JUMP_EQUAL, number, [_refuse(errno.EOPNOTSUPP)])
    for rule in _RULES:
        statements += _if(_JUMP_EQUAL, machine.numbers[rule.call], _check(rule))
    return [*statements, _statement(_RETURN, _ALLOW)]


def _check(rule: _Rule) -> list[bytes]:
    """Refuse a call by one argument, or load its number again for the next rules."""
    at = _AT_ARGUMENTS + rule.argument * _ARGUMENT_BYTES
    found, other = (1, 0) if rule.is_required else (0, 1)
    return [
        _statement(_LOAD, at),
        _statement(_AND, rule.mask),
        _statement(_JUMP_EQUAL, rule.value, then=found, is_not=other),
        _refuse(rule.error),
        _statement(_LOAD, _AT_NUMBER),
    ]


def _refuse(error: int) -> bytes:
    return _statement(_RETURN, _REFUSE | error)


def _if(code: int, value: int, body: list[bytes]) -> list[bytes]:
    """Do the body where the comparison holds, and skip it elsewhere."""
    return [_statement(code, value, is_not=len(body)), *body]


def _statement(code: int, value: int, *, then: int = 0, is_not: int = 0) -> bytes:
    """Pack one statement; `then` and `is_not` say how many a jump skips."""
    return struct.pack("<HBBI", code, then, is_not, value)
