"""SGLang's processes: end them, and run one server.

`python -m agentrl.engines.sglang.processes PARENT` runs a server. PARENT is the id of the process
that starts it; the server ends when that process ends. The standard input holds the arguments of
SGLang's `ServerArgs` as JSON, because every user of the machine can read a command line.
"""
# pyright: reportMissingImports=false

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1


def with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return processes and their descendants, without those that have ended."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(found.values())


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, without a wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run_server(arguments: Sequence[str]) -> None:
    """Run a server until it is ended.

    If SGLang fails, such as at a port that is in use, it leaves its other processes, and its main
    process would wait for them forever. So they are killed.
    """
    end_with(int(arguments[0]))
    server_arguments = json.load(sys.stdin)
    if key := server_arguments.get("api_key"):
        keep_out_of_logs(key)
    warnings.simplefilter("ignore")  # about kernels of other devices
    from sglang.launch_server import run_server as run_sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    try:
        run_sglang(ServerArgs(**server_arguments))
    finally:
        kill(with_children([os.getpid()])[1:])


def keep_out_of_logs(secret: str) -> None:
    """Replace a secret in what this process logs: SGLang can log its arguments."""
    make = logging.getLogRecordFactory()

    def make_without_secret(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        record.msg = str(record.msg).replace(secret, "[redacted]")
        return record

    logging.setLogRecordFactory(make_without_secret)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; SGLang's processes end with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)


if __name__ == "__main__":
    run_server(sys.argv[1:])
