"""The interface of every sandbox: sessions, programs, and the result of one execution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ExecutionEnd(StrEnum):
    """How an execution ended."""

    OK = "ok"
    """It ran to its end (a command: with exit code 0)."""
    ERROR = "error"
    """The code raised, or the command ended with another exit code."""
    TIMEOUT = "timeout"
    """It was killed because its wall clock time was up."""
    CPU = "cpu"
    """It was killed because its CPU seconds were used up."""
    MEMORY = "memory"
    """It asked for more memory than its limit."""
    KILLED = "killed"
    """It died otherwise: by a signal or by a forbidden system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of one execution."""

    end: ExecutionEnd
    stdout: str = ""
    stderr: str = ""
    """Includes the traceback of Python code, without frames of agentrl."""
    exit_code: int | None = None
    """Exit code of a command; None if it was killed, and for Python code in a session."""
    seconds: float = 0.0
    num_cut_bytes: int = 0
    """Bytes of output that were thrown away."""

    @property
    def is_ok(self) -> bool:
        """Whether it ran to its end."""
        return self.end is ExecutionEnd.OK


class Session(Protocol):
    """The state of one request in a sandbox: files and, for Python, names stay between calls."""

    async def run(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        echo: bool = False,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run Python code or a shell script after the earlier calls. Calls run one at a time.

        If the interpreter is killed, its names are lost: the next call starts a new interpreter
        with the files that are left, and its `stderr` says so. Cancelling kills what runs and
        deletes the files.

        Args:
            source: The code.
            timeout_s: Seconds of wall clock; None for the configured value.
            echo: Print the value of a last Python expression, as a notebook does.
            max_output_bytes: Bytes of output to keep; None for the configured value.

        Raises:
            SandboxError: If the sandbox itself failed, and not the code.
        """
        ...

    async def close(self) -> None:
        """Kill what runs and delete the files. May be called twice."""
        ...


class Sandbox(Protocol):
    """Runs code that a model wrote. All requests of one run and event loop share one sandbox."""

    async def open_python(self) -> Session:
        """Open a session of a Python interpreter."""
        ...

    async def open_shell(self) -> Session:
        """Open a session of a shell. Each call is a new shell in the same folder."""
        ...

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program in a new folder that holds `files`, and delete the folder.

        Args:
            argv: The program and its arguments; `python` is the sandbox's interpreter.
            files: Texts by relative path.
            stdin: The text of its standard input.
            env: Environment variables, besides those of the sandbox.
            timeout_s: Seconds; None for the configured value.
            max_output_bytes: Bytes of output to keep; None for the configured value. Of a longer
                output half of them are from its start and half from its end (a service keeps the
                start only).

        Raises:
            SandboxError: If the sandbox itself failed, and not the program.
        """
        ...

    async def close(self) -> None:
        """Kill everything and delete every file. May be called twice."""
        ...
