"""Programs that start at once: forked from a process that has imported torch and agentrl.

To import them takes a fresh process some seconds of a core. `python -m tests.fakes.forker` imports
them once and reads one order (a line of JSON) for each program.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "datasets",
    "agentrl.commands.train",
    "agentrl.trainer.trainer",
    "agentrl.engines.transformers.engine",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)


# The side of the tests.


class ForkedProgram:
    """`python -m module` in a process of its own, with the methods of `subprocess.Popen`."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str], cwd: Path = ROOT
    ) -> None:
        forker, folder = _start_forker()
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        os.mkfifo(self._folder / "status")
        order = {
            "module": module, "arguments": arguments, "environment": dict(environment),
            "cwd": str(cwd), "folder": str(self._folder),
        }  # fmt: skip
        assert forker.stdin is not None
        forker.stdin.write(json.dumps(order) + "\n")
        forker.stdin.flush()
        self._status = open(self._folder / "status")  # noqa: SIM115 - closed by `wait`
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status, or minus the signal's number."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to standard output and standard error."""
        self.wait(timeout)
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _start_forker() -> tuple[subprocess.Popen[str], str]:
    """Start the process once; return it, and a folder that lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    forker = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.forker"], cwd=ROOT, stdin=subprocess.PIPE, text=True
    )

    def end() -> None:
        forker.communicate()
        folder.cleanup()

    atexit.register(end)
    return forker, folder.name


# The side of the programs.


def main() -> None:
    """Fork a program for each order."""
    import torch

    torch.set_num_threads(1)
    for name in _PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        keeper = os.fork()
        if keeper == 0 and (order := _fork_and_report(json.loads(line))):
            _become(order)
            return


def _fork_and_report(order: dict[str, Any]) -> dict[str, Any] | None:
    """Return the order in the new process; in this one report its end, and exit."""
    pid = os.fork()
    if pid == 0:
        return order
    with open(f"{order['folder']}/status", "w", buffering=1) as status:
        status.write(f"{pid}\n")
        status.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    os._exit(0)


def _become(order: dict[str, Any]) -> None:
    """Run the program in this process, which ends as Python's processes do."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    sys.path[0] = order["cwd"]
    sys.argv = [order["module"], *order["arguments"]]
    # A shell's job in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{order['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
