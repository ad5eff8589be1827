"""How a process leaves that was interrupted, or that waits for nothing any more."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

EXIT_CODE = 130
"""Of what Ctrl-C or SIGTERM has ended."""
MAX_WAIT_S = 5.0
"""Seconds that a finished process waits for threads that code of users started."""
_SILENT_EXIT = (
    "error: code of a plug-in ended this process by os._exit(0)\n"
    "  expected: isolation: process in the config of a tool that may end its process"
)
_leave = os._exit


@contextmanager
def importing() -> Iterator[None]:
    """Leave at once on Ctrl-C in the `with` block, which imports what is heavy.

    Libraries take a `KeyboardInterrupt` in their imports for a module that is broken. Nothing was
    begun yet that could be lost.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # it is ignored, or somebody else's
        return
    signal.signal(signal.SIGINT, _leave_imports)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted(*more: str) -> None:
    """Say that the command was interrupted, once for all ranks, and what is left of it."""
    if os.environ.get("RANK", "0") == "0":
        print(": ".join(["interrupted", *more]), flush=True)


def _leave_imports(*_: object) -> NoReturn:
    say_interrupted()
    end_process(EXIT_CODE)


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
    _leave(code)


def end_without_waiting(code: int) -> None:
    """End this process soon, though threads of users' code never end. Returns at once.

    Python waits for every thread that is no daemon. A run that has saved everything would keep its
    machine for a thread that a tool left behind.
    """

    def end() -> None:
        time.sleep(MAX_WAIT_S)
        main = threading.main_thread()
        left = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        if left:
            print(f"note: threads that do not end: {', '.join(left)}", file=sys.stderr)
            end_process(code)

    threading.Thread(target=end, name="agentrl-end", daemon=True).start()


def report_silent_exit() -> None:
    """Let no code end this process as if it had succeeded.

    A tool without isolation shares the trainer's process; one that calls `os._exit(0)` would end
    the run with the exit code of a finished one.
    """
    own = os.getpid()

    def leave(code: int) -> NoReturn:
        if os.getpid() == own and code == 0:
            with suppress(Exception):
                print(_SILENT_EXIT, file=sys.stderr, flush=True)
            code = 1
        _leave(code)

    os._exit = leave


def _kill(pid: int | None) -> None:
    """Kill a process, and the group that it leads."""
    if pid is None:
        return
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
