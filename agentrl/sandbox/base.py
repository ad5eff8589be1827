"""What every sandbox can do, whoever keeps the code in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ExecutionEnd(StrEnum):
    """How an execution ended."""

    OK = "ok"
    """It ran to its end (of a command: with exit code 0)."""
    ERROR = "error"
    """The code raised, or the command ended with another exit code: its own fault."""
    TIMEOUT = "timeout"
    """Its wall clock was up; it was killed."""
    CPU = "cpu"
    """Its CPU seconds were used up; it was killed."""
    MEMORY = "memory"
    """It asked for more memory than it may have."""
    KILLED = "killed"
    """The interpreter died otherwise: a signal, a forbidden system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What came of one execution."""

    end: ExecutionEnd
    stdout: str = ""
    stderr: str = ""
    """Of Python: the traceback too, without lines of agentrl's own."""
    exit_code: int | None = None
    """Of a command; None where it was killed, and of Python code in a session."""
    seconds: float = 0.0
    num_cut_bytes: int = 0
    """Output that was thrown away, in bytes."""

    @property
    def is_ok(self) -> bool:
        """Whether it ran to its end."""
        return self.end is ExecutionEnd.OK


class Session(Protocol):
    """One request's place in a sandbox: files, and for Python names, stay from call to call."""

    async def run(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        echo: bool = False,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run Python code, or a shell script, behind what ran before.

        What kills the interpreter ends its state: the next call begins in a new one, with the
        files that are left, and its `stderr` says so. Cancelling kills what runs, and its files
        are gone. Calls of one session run one after another.

        Args:
            source: The code.
            timeout_s: Seconds of wall clock; None: the configuration's.
            echo: Whether the value of a last expression of Python is printed, as in a notebook.
            max_output_bytes: Bytes of output that are kept; None: the configuration's.

        Raises:
            SandboxError: where the sandbox itself failed, and not the code.
        """
        ...

    async def close(self) -> None:
        """Kill what runs and delete the files. May be called twice."""
        ...


class Sandbox(Protocol):
    """Runs code that a model wrote. One for a run (and event loop), for every request of it."""

    async def open_python(self) -> Session:
        """Open a session of a Python interpreter. It starts with its first call, or was warm."""
        ...

    async def open_shell(self) -> Session:
        """Open a session of a shell; each call is a new shell in the same folder."""
        ...

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program in a fresh folder that holds `files`, and forget it all.

        Args:
            argv: The program and its arguments; `python` is the sandbox's own interpreter.
            files: Texts by relative path.
            stdin: What it can read.
            timeout_s: Seconds; None: the configuration's.
            max_output_bytes: Bytes of output that are kept; None: the configuration's.

        Raises:
            SandboxError: where the sandbox itself failed, and not the program.
        """
        ...

    async def close(self) -> None:
        """Kill everything and delete every file. May be called twice."""
        ...
