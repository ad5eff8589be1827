"""The limits of what code may use, bound to the processes that run it."""

import os
import resource
import signal
from typing import TypedDict


class Limits(TypedDict):
    """What a guest is told."""

    rlimits: dict[str, int]
    """By their names in `resource`."""
    is_alone: bool
    """Whether it can signal no process but those of its own sandbox."""
    syscall_filter: str | None
    """A program for seccomp, as hexadecimal; None: no call is refused."""
    hidden: list[tuple[str, str]]
    """Beginnings of paths, and what a traceback shows in their place."""


def bind_limits(limits: Limits) -> None:
    """Bind the limits to this process and all that it starts; they cannot be raised again."""
    for name, most in limits["rlimits"].items():
        kind: int = vars(resource)[name]
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        # Between the soft limit, whose signal tells what happened, and the hard one: a second.
        extra_s = 1 if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else 0
        resource.setrlimit(kind, (most, most + extra_s))


def become(limits: Limits, stdin: int, stdout: int, stderr: int) -> None:
    """Make a forked process one that code may have: its limits, its three descriptors."""
    os.setpgid(0, 0)
    for descriptor, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    bind_limits(limits)


def how_it_died(status: int, usage: resource.struct_rusage, limits: Limits) -> tuple[str, str]:
    """Tell the end of a process that should not have ended, and say it in words."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return "killed", f"[the interpreter was ended with exit code {code}]\n"
    number = os.WTERMSIG(status)
    used_s = usage.ru_utime + usage.ru_stime
    is_used_up = number == signal.SIGKILL and used_s >= limits["rlimits"]["RLIMIT_CPU"]
    if number == signal.SIGXCPU or is_used_up:
        return "cpu", "[killed: its CPU seconds were used up]\n"
    if number == signal.SIGKILL:
        return "memory", "[killed: most likely it used more memory than it may]\n"
    return "killed", f"[killed by {signal.Signals(number).name}]\n"
