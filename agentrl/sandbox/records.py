"""What one execution in a sandbox is asked for, and what comes of it."""

from dataclasses import dataclass
from enum import StrEnum


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
