"""The processes below this one: their memory, and their end."""

import os
import signal
import time
from contextlib import suppress


def descendants() -> list[int]:
    """List all processes below this one."""
    found: list[int] = []
    new = [os.getpid()]
    while new:
        new = [child for pid in new for child in children(pid)]
        found += new
    return found


def children(pid: int) -> list[int]:
    """List the processes that one started; one may be missed while another ends."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return found


def bound_memory(most_bytes: int) -> None:
    """Kill the largest processes below this one where all of them use more than they may."""
    running = descendants()
    if sum(map(_resident_bytes, running)) <= most_bytes:  # counts what they share several times
        return
    used = {pid: _proportional_bytes(pid) for pid in running}
    while sum(used.values()) > most_bytes:
        largest = max(used, key=used.__getitem__)
        kill(largest)
        del used[largest]


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _proportional_bytes(pid: int) -> int:
    """Measure a process's memory, with its part of what it shares."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return 0
    except PermissionError:
        return _resident_bytes(pid)


def kill_descendants() -> None:
    """Kill all processes below this one until there is none; orphans come to it."""
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
    """Send a signal to a process, where it is still there; -1: to all that this one may."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
