"""How a process leaves that was interrupted, or that waits for nothing any more."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

EXIT_CODE = 130
"""Of what Ctrl-C or SIGTERM has ended."""


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
    os._exit(code)


def _kill(pid: int | None) -> None:
    """Kill a process, and the group that it leads."""
    if pid is None:
        return
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
