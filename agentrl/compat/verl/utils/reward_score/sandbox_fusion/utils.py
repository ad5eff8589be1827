"""`verl.utils.reward_score.sandbox_fusion.utils`: one program on a SandboxFusion service."""

import asyncio
from contextlib import nullcontext
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox import Execution, ExecutionEnd
from agentrl.sandbox.fusion import FusionClient

FINISHED = (ExecutionEnd.OK, ExecutionEnd.ERROR)
"""Ends of programs that the service calls finished."""


def _process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: int,
    memory_limit_mb: int,
    language: str,
    concurrent_semaphore: Any = None,
    fn_name: str | None = None,
) -> tuple[bool | int, dict[str, Any]]:
    """Run a program on a thread without an event loop.

    Returns:
        True (it printed what was expected, or nothing was), False, -1 (the service failed) or -2
        (it ran out of time); and how it ran.
    """
    with concurrent_semaphore or nullcontext():
        try:
            execution = asyncio.run(
                _run(sandbox_fusion_url, generation, stdin_data, timeout, memory_limit_mb, language)
            )
        except SandboxError as error:
            return -1, {"status": "api_error", "run_status": None, "api_request_error": str(error)}
    has_ended = execution.end in FINISHED
    expected = execution.stdout if expected_output is None else str(expected_output)
    is_right = execution.end is ExecutionEnd.OK and execution.stdout.strip() == expected.strip()
    metadata = {
        "case_index": case_index,
        "run_status": "Finished" if has_ended else "TimeLimitExceeded",
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "exit_code": execution.exit_code,
        "status": "success" if is_right else "wrong_answer" if has_ended else "timeout",
        "api_request_error": None,
    }
    return is_right if has_ended else -2, metadata


async def _run(
    url: str, code: str, stdin: Any, timeout_s: float, memory_limit_mb: int, language: str
) -> Execution:
    client = FusionClient(url, memory_limit_mb=memory_limit_mb)
    try:
        return await client.run(
            code, timeout_s=timeout_s, language=language, stdin=str(stdin or "")
        )
    finally:
        await client.close()
