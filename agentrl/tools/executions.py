"""What a model is told of code that it ran."""

from typing import Any

from agentrl.sandbox import Execution, ExecutionEnd

NOTHING = "(no output)"

_ENDS_STATE = {ExecutionEnd.TIMEOUT, ExecutionEnd.CPU, ExecutionEnd.KILLED}
"""Ends behind which the sandbox begins anew; what needed too much memory was only refused it."""


def describe_execution(execution: Execution, *, lost: str = "") -> str:
    """Show an execution: its output, and behind it its errors, which say what stopped it.

    Args:
        execution: What came of it.
        lost: What is gone where it was stopped, in words.
    """
    parts = [execution.stdout.strip("\n"), execution.stderr.strip("\n")]
    if execution.num_cut_bytes:
        parts.append(f"[{execution.num_cut_bytes} more bytes of output were thrown away]")
    if execution.end in _ENDS_STATE:
        parts.append(lost)
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    return "\n".join(part for part in parts if part) or NOTHING


def measure(execution: Execution) -> dict[str, Any]:
    """Give what a call's record keeps of an execution."""
    return {
        "end": execution.end.value,
        "seconds": execution.seconds,
        "num_cut_bytes": execution.num_cut_bytes,
    }
