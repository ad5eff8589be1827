"""End a process that was interrupted, or that has finished but has threads that do not end."""

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
"""Exit code of a process that SIGINT or SIGTERM ended."""
MAX_WAIT_S = 5.0
"""Seconds that a finished process waits for threads of users' code."""
_SILENT_EXIT = (
    "error: code of a plug-in ended this process by os._exit(0)\n"
    "  expected: isolation: process in the config of a tool that may end its process"
)
_exit_now = os._exit


@contextmanager
def importing() -> Iterator[None]:
    """End the process immediately on Ctrl-C in the `with` block, which imports heavy packages.

    Libraries treat a `KeyboardInterrupt` during their imports as a broken module. No work has
    started yet that could be lost.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the signal is ignored, or handled by other code
        return
    signal.signal(signal.SIGINT, _end_imports)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def print_interrupted(*details: str) -> None:
    """Print that the command was interrupted, on one rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(": ".join(["interrupted", *details]), flush=True)


def _end_imports(*_: object) -> NoReturn:
    print_interrupted()
    end_process(EXIT_CODE)


def end_process(code: int) -> NoReturn:
    """End this process, and kill its child processes with the process groups that they lead.

    A signal handler may call this: no error on the way prevents the exit.

    Args:
        code: The exit code.
    """
    with suppress(Exception):
        for process in multiprocessing.active_children():
            pid = process.pid
            with suppress(ProcessLookupError):
                if pid is not None and os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    _exit_now(code)


def end_without_waiting(code: int) -> None:
    """End this process soon, even if threads of users' code never end. Returns immediately.

    Python waits for every thread that is not a daemon. A thread that a tool leaves running would
    keep a run from ending after it has saved everything.
    """

    def end() -> None:
        time.sleep(MAX_WAIT_S)
        main = threading.main_thread()
        running = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        if running:
            print(f"note: threads that do not end: {', '.join(running)}", file=sys.stderr)
            end_process(code)

    threading.Thread(target=end, name="agentrl-end", daemon=True).start()


def report_silent_exit() -> None:
    """Make `os._exit(0)` of a plug-in an error, so that the run does not look successful.

    A tool without isolation shares the trainer's process.
    """
    own = os.getpid()

    def leave(code: int) -> NoReturn:
        if os.getpid() == own and code == 0:
            with suppress(Exception):
                print(_SILENT_EXIT, file=sys.stderr, flush=True)
            code = 1
        _exit_now(code)

    os._exit = leave
