"""One program in a sandbox, from its start to its end."""

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from limits import Limits, become, how_it_died
from output_reader import LATE, Watch, output_pipe

_STDIN = ".stdin"


class Program:
    """Starts a program, and says what came of it by what the kernel tells.

    Args:
        argv: `python` is this interpreter.
        stdin: What it can read.
        limits: What it may use.
    """

    def __init__(self, argv: Sequence[str], stdin: str, limits: Limits) -> None:
        self._limits = limits
        self._status: int | None = None
        self._usage: resource.struct_rusage | None = None
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self.outputs = (out, err)
        source = _text_file(stdin)
        self._pid = os.fork()
        if self._pid == 0:
            self._become(_own_interpreter(argv), source, far_out, far_err)
        for descriptor in (far_out, far_err, source):
            os.close(descriptor)

    def _become(self, argv: list[str], source: int, out: int, err: int) -> NoReturn:
        try:
            become(self._limits, source, out, err)
            os.closerange(3, 256)
            os.execvp(argv[0], argv)
        except (OSError, ValueError) as error:
            os.write(2, f"{argv[0]}: {told(error)}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def has_ended(self) -> bool:
        """Look whether it has ended."""
        if self._status is None:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid:
                self._status, self._usage = status, usage
        return self._status is not None

    def answer(self, watch: Watch) -> dict[str, Any]:
        """Say what came of it."""
        for descriptor in self.outputs:
            os.close(descriptor)
        told = watch.told()
        if self._status is None or self._usage is None:
            is_flood = watch.is_flooded
            note = "" if is_flood else LATE
            return {
                **told,
                "end": "killed" if is_flood else "timeout",
                "stderr": told["stderr"] + note,
            }
        if not os.WIFEXITED(self._status):
            end, note = how_it_died(self._status, self._usage, self._limits)
            return {**told, "end": end, "stderr": told["stderr"] + note}
        code = os.WEXITSTATUS(self._status)
        return {**told, "end": _end_of(code, told["stderr"]), "exit_code": code}


def _end_of(code: int, stderr: str) -> str:
    if code == 0:
        return "ok"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


def told(error: Exception) -> str:
    """Say what an error says, without paths of the machine."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _own_interpreter(argv: Sequence[str]) -> list[str]:
    if argv[0] in ("python", "python3"):
        return [sys.executable, "-S", "-s", *argv[1:]]
    return [*argv]


def _text_file(text: str) -> int:
    """Open what a program reads: a file that has no name any more."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    with open(_STDIN, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    descriptor = os.open(_STDIN, os.O_RDONLY)
    os.unlink(_STDIN)
    return descriptor


def write_files(files: dict[str, str]) -> None:
    """Write texts into the folder, and nowhere else.

    Raises:
        ValueError: for a path that leads out of it.
    """
    for name, text in files.items():
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{name}: a path inside the folder was expected")
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
