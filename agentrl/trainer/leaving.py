"""The end of a process that waits for nothing: its tools' processes are killed, none released."""

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process, and its tools' processes with all that they started.

    A signal handler may call it: nothing that goes wrong on the way keeps the process.

    Args:
        code: The exit code.
    """
    with suppress(Exception):
        for process in multiprocessing.active_children():
            _kill(process.pid)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _kill(pid: int | None) -> None:
    """Kill a process, and the group that it leads."""
    if pid is None:
        return
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
