"""Limit, measure and kill the processes of a sandbox."""

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

SIGKILLED = "[killed by SIGKILL: by its own code, or by the system]\n"


class Limits(TypedDict):
    """The limits that the guest sets on the processes it starts."""

    rlimits: dict[str, int]
    """Values by the names of `resource`."""
    is_isolated: bool
    """Whether a process can signal only processes of its own sandbox."""
    syscall_filter: str | None
    """A seccomp program in hexadecimal; None allows every system call."""
    relay: tuple[str, int] | None
    """The gateway's socket, and the port in the sandbox at which programs reach it."""
    hidden: list[tuple[str, str]]
    """Prefixes of paths, and the text that replaces each of them in a traceback."""


def prepare_child(limits: Limits, stdin: int, stdout: int, stderr: int) -> None:
    """Give a forked process its own group, descriptors, default signal handling and limits.

    The limits apply to everything that the process starts, and cannot be raised again. Python
    ignores SIGPIPE and SIGXFSZ, and the processes above this one may ignore or block others: a
    program inherits that.
    """
    os.setpgid(0, 0)
    for descriptor, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, value in limits["rlimits"].items():
        kind: int = vars(resource)[name]
        hard = resource.getrlimit(kind)[1]
        is_unlimited = hard == resource.RLIM_INFINITY
        soft = value if is_unlimited else min(value, hard)
        # The signal of the soft limit says what happened. The hard limit kills a second later.
        extra_s = 1 if name == "RLIMIT_CPU" and is_unlimited else 0
        resource.setrlimit(kind, (soft, soft + extra_s))


def describe_death(status: int, usage: resource.struct_rusage, limits: Limits) -> tuple[str, str]:
    """Return the end of a process that should not have ended, and a note that explains it."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return "killed", f"[the interpreter was ended with exit code {code}]\n"
    number = os.WTERMSIG(status)
    used_s = usage.ru_utime + usage.ru_stime
    is_used_up = number == signal.SIGKILL and used_s >= limits["rlimits"]["RLIMIT_CPU"]
    if number == signal.SIGXCPU or is_used_up:
        return "cpu", "[killed: its CPU seconds were used up]\n"
    if number == signal.SIGKILL:
        return "killed", SIGKILLED  # the supervisor alone knows whether it was for memory
    return "killed", f"[killed by {signal.Signals(number).name}]\n"


def descendants() -> list[int]:
    """List all processes below this one."""
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        parents = [child for pid in parents for child in _children(pid)]
        found += parents
    return found


def _children(pid: int) -> list[int]:
    """List the children of a process. A child can be missed while another one ends."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def bound_memory(max_bytes: int, report: Callable[[], None]) -> None:
    """Kill the largest processes below this one while together they use more than `max_bytes`.

    `report` is called before each kill.
    """
    running = descendants()
    if sum(map(_resident_bytes, running)) <= max_bytes:  # counts shared memory several times
        return
    used = {pid: _proportional_bytes(pid) for pid in running}
    while sum(used.values()) > max_bytes:
        largest = max(used, key=used.__getitem__)
        report()
        kill(largest)
        del used[largest]


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """Measure the memory of a process, with its share of what it shares with others."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return 0
    except PermissionError:
        return _resident_bytes(pid)


def kill_descendants() -> None:
    """Kill all processes below this one until none is left. This process adopts orphans."""
    while True:
        for pid in descendants():
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process if it still exists; -1 means every process that this one may."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
