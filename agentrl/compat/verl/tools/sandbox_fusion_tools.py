"""`verl.tools.sandbox_fusion_tools`: agentrl's tool, with verl's text and attributes."""

import asyncio
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from agentrl.compat.verl.utils.reward_score.sandbox_fusion.utils import FINISHED
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.sandbox import Execution
from agentrl.tools.sandbox_fusion_tool import SandboxFusionTool as OwnSandboxFusionTool

_NOT_FINISHED = "no stdout here"


class PoolMode(Enum):
    """How verl's pool runs; here it is the event loop in both modes."""

    ThreadMode = 1
    ProcessMode = 2


class _Remote:
    """Calls a function where verl would send it to a Ray actor."""

    async def remote(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await an async function; run a plain one on a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)


class ExecutionPool:
    """What `execution_pool.execute.remote(function, ...)` needs."""

    def __init__(self) -> None:
        self.execute = _Remote()


def init_execution_pool(*args: Any, **kwargs: Any) -> ExecutionPool:
    """Make a pool; how many calls run at once is the tool's `max_concurrency`."""
    return ExecutionPool()


class SandboxFusionTool(OwnSandboxFusionTool):
    """Run programs on a SandboxFusion service, and show the policy verl's text.

    Subclasses that run their code by `self.execution_pool.execute.remote(self.execute_code, ...)`
    work as they are.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__({"enable_global_rate_limit": True, **config}, tool_schema)
        self.default_timeout = self._keys.default_timeout
        self.default_language = self._keys.default_language
        self.sandbox_fusion_url = self._keys.sandbox_fusion_url
        self.memory_limit_mb = self._keys.memory_limit_mb
        self.num_workers = self._keys.num_workers
        self.execution_pool = init_execution_pool()

    async def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> ToolResponse:
        """Run a program, and word its output as verl does."""
        execution = await self.run_program(code, timeout_s=timeout, language=language)
        return ToolResponse(text=self.describe(execution))

    def describe(self, execution: Execution) -> str:
        """Show output and errors together; of a program that did not end, a fixed text."""
        if execution.end not in FINISHED:
            return _NOT_FINISHED
        return execution.stdout + execution.stderr
