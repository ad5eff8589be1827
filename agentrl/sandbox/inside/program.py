"""Run one program in a sandbox, from its start to its end."""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from output_reader import TIMED_OUT, OutputReader, output_pipe
from processes import Limits, describe_death, prepare_child

_STDIN = ".stdin"


class Program:
    """Starts a program and reports its end as the kernel reports it.

    Args:
        argv: The command line; `python` is this interpreter.
        stdin: The text of its standard input.
        limits: Its limits.
        env: Environment variables, besides those of the guest.
    """

    def __init__(
        self, argv: Sequence[str], stdin: str, limits: Limits, *, env: Mapping[str, str]
    ) -> None:
        self._limits = limits
        self._env = {**os.environ, **env}
        self._ended: tuple[int, resource.struct_rusage] | None = None
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self.outputs = (out, err)
        source = _open_text(stdin)
        self._pid = os.fork()
        if self._pid == 0:
            self._execute([*argv], source, far_out, far_err)
        for descriptor in (far_out, far_err, source):
            os.close(descriptor)

    def _execute(self, argv: list[str], source: int, out: int, err: int) -> NoReturn:
        if argv[0] in ("python", "python3"):
            argv = [sys.executable, "-S", "-s", *argv[1:]]
        try:
            prepare_child(self._limits, source, out, err)
            os.closerange(3, 256)
            os.execvpe(argv[0], argv, self._env)
        except (OSError, ValueError) as error:
            os.write(2, f"{argv[0]}: {describe(error)}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def has_ended(self) -> bool:
        """Whether the program has ended."""
        if self._ended is None:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            self._ended = (status, usage) if pid else None
        return self._ended is not None

    def result(self, reader: OutputReader) -> dict[str, Any]:
        """Return the fields of the answer, and close the outputs."""
        for descriptor in self.outputs:
            os.close(descriptor)
        result, exit_code, note = reader.result(), None, ""
        if self._ended is None:
            end, note = ("killed", "") if reader.is_flooded else ("timeout", TIMED_OUT)
        elif os.WIFEXITED(self._ended[0]):
            exit_code = os.WEXITSTATUS(self._ended[0])
            last_line = result["stderr"].rstrip().rpartition("\n")[2]
            failed = "memory" if last_line.startswith("MemoryError") else "error"
            end = failed if exit_code else "ok"
        else:
            end, note = describe_death(*self._ended, self._limits)
        return {**result, "end": end, "stderr": result["stderr"] + note, "exit_code": exit_code}


def describe(error: Exception) -> str:
    """Describe an error without paths of the machine."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _open_text(text: str) -> int:
    """Open a text for reading, as a file that has no name any more."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    with open(_STDIN, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    descriptor = os.open(_STDIN, os.O_RDONLY)
    os.unlink(_STDIN)
    return descriptor


def write_files(files: dict[str, str]) -> None:
    """Write texts into the current folder.

    Raises:
        ValueError: If a path leads out of the folder.
    """
    for name, text in files.items():
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{name}: a path inside the folder was expected")
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
