"""A seccomp filter for the code in a sandbox: the kernel refuses what the providers leave open.

Namespaces hide files, processes and networks. Landlock refuses to open files and to connect by TCP.
Both leave other interfaces of the kernel open. The filter refuses five kinds of calls:

1. Interfaces that were used for escapes (io_uring, userfaultfd, keyrings, bpf), namespaces, mounts.
2. Sockets of every family except Unix; an agent has those of IP too, in a network of its own, by
   which it reaches the gateway. Landlock checks `connect` and `bind` of plain TCP only:
   MPTCP, fast open and `listen` without `bind` pass it. The memory of TCP sockets is one budget of
   the whole machine, which no namespace divides.
3. Memory that counts for no process, so that no limit applies: files without a name, System V
   objects, message queues, pages lent to a pipe, shared anonymous mappings (they stay whole while
   one page is mapped), and buffers of sockets and pipes beyond their default size. Files in the
   private folder can be mapped shared.
4. Calls that change another process of the same user (its limits, priority, processors, memory),
   and attributes of files, which Landlock does not check.
5. Calls that use up a budget of the machine or look past the mounts (`io_setup`, inotify), and
   every call newer than Linux 5.13, as if the kernel were older.

Python, compilers and shells need none of them.

The filter is classic BPF as `seccomp(2)` describes it: statements of 8 bytes over the record
`struct seccomp_data`.
"""

import errno
import platform
import struct
from collections.abc import Sequence
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
"""The family of sockets that everything may open."""
IP_FAMILIES = (2, 10)
"""The families of IP, versions 4 and 6."""
_SELF, _OF_PROCESS, _INPUT_OF_PROCESS = 0, 0, 1
"""The number that means the caller; the kinds of `setpriority` and `ioprio_set` that accept it."""
_FIRST_NEW_CALL = 443
"""From here on all architectures use the same numbers; the calls of x32 are above too."""
_CLONE3 = 435
"""Its flags are in memory, which a filter cannot read. Without this call the C library falls back
to `clone`."""


class _Rule(NamedTuple):
    """A value that one argument of a call must have, or must not have."""

    call: str
    argument: int
    value: int
    is_required: bool = True
    """Whether the argument must have this value; False if it must not."""
    mask: int = 0xFFFFFFFF
    """The bits to compare. The kernel reads at most 32 bits of these arguments."""
    error: int = errno.EPERM
    others: tuple[int, ...] = ()
    """Further values that a required argument may have."""


_RULES = (
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


_CALLS = (
    *("socket", "socketpair", "setsockopt", "fcntl", "mmap", "clone", "prlimit64"),
    *("setpriority", "ioprio_set", "sched_setparam", "sched_setscheduler"),
    *("sched_setaffinity", "sched_setattr"),
)
"""The calls that the rules name."""


class _Machine(NamedTuple):
    architecture: int
    """The number in the audit interface."""
    numbers: tuple[int, ...]
    """The numbers of `_CALLS`."""
    refused: tuple[int, ...]
    attributes: tuple[int, ...]
    """Calls that set and remove attributes of files."""


_EVERYWHERE = (
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fs*, mount_setattr
    *(438, 440),  # pidfd_getfd, process_madvise
)
_MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E,
        numbers=(41, 53, 54, 72, 9, 56, 302, 141, 251, 142, 144, 203, 314),
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
        numbers=(198, 199, 208, 25, 222, 220, 261, 140, 30, 118, 119, 122, 274),
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


def syscall_filter(machine: str | None = None, *, families: tuple[int, ...] = ()) -> bytes:
    """Make the filter for a machine; None for this one.

    Args:
        machine: Its architecture.
        families: The families of sockets that are allowed, besides Unix.

    Raises:
        SandboxError: If the numbers of its system calls are unknown.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(
            f"no filter of system calls for {machine}", expected=" or ".join(_MACHINES)
        )
    sockets = _Rule("socket", 0, _UNIX, error=errno.EAFNOSUPPORT, others=families)
    return b"".join(_statements(_MACHINES[machine], (sockets, *_RULES)))


def _statements(machine: _Machine, rules: Sequence[_Rule]) -> list[bytes]:
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
    for number in machine.attributes:  # programs expect this of file systems without attributes
        statements += _if(_JUMP_EQUAL, number, [_refuse(errno.EOPNOTSUPP)])
    numbers = dict(zip(_CALLS, machine.numbers, strict=True))
    for rule in rules:
        statements += _if(_JUMP_EQUAL, numbers[rule.call], _check(rule))
    return [*statements, _statement(_RETURN, _ALLOW)]


def _check(rule: _Rule) -> list[bytes]:
    """Refuse a call by one argument; else load its number again for the next rules."""
    at = _AT_ARGUMENTS + rule.argument * _ARGUMENT_BYTES
    found, other = (1, 0) if rule.is_required else (0, 1)
    further = len(rule.others)
    return [
        _statement(_LOAD, at),
        _statement(_AND, rule.mask),
        *(
            _statement(_JUMP_EQUAL, value, then=1 + further - index)
            for index, value in enumerate(rule.others)
        ),
        _statement(_JUMP_EQUAL, rule.value, then=found, is_not=other),
        _refuse(rule.error),
        _statement(_LOAD, _AT_NUMBER),
    ]


def _refuse(error: int) -> bytes:
    return _statement(_RETURN, _REFUSE | error)


def _if(code: int, value: int, body: list[bytes]) -> list[bytes]:
    """Run the body if the comparison holds; else skip it."""
    return [_statement(code, value, is_not=len(body)), *body]


def _statement(code: int, value: int, *, then: int = 0, is_not: int = 0) -> bytes:
    """Pack one statement. A jump skips `then` statements if it holds, else `is_not`."""
    return struct.pack("<HBBI", code, then, is_not, value)
